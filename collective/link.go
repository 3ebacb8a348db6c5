package collective

// link is the connection to another process.
type link struct{}

func (l *link) interrupt()                               {}
func (l *link) bye(int)                                  {}
func (l *link) finish()                                  {}
func (l *link) sendData(*group, *lane, call, view) error { return nil }
func (l *link) sendTaken(*group, *lane) error            { return nil }
func (p *process) announce(*group) error                 { return nil }
