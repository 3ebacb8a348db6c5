package kvcache

// State tells whether a table or a pin holds a block and whether it can be matched. A block that is
// neither is free, one that can only be matched is cached.
func (p *Pool) State(id int32) (held, matchable bool) {
	b := &p.blocks[id]
	return b.refs > 0, b.registered
}
