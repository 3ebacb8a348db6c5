package transfer

import "fmt"

// maxMemory refuses sizes that can only be a mistake: 64 TiB, a quarter of what a process can map.
const maxMemory = 1 << 46

// Memory is a region that transfers read and write: a KV pool, outside the Go heap, shareable with
// other processes through its descriptor.
type Memory struct {
	Data []byte // page-aligned; zero at first
	FD   int    // a memfd, or -1 where the system has none

	mapped []byte // Data rounded up to whole pages
}

// NewMemory maps size bytes of zeros. name is for people who look at the process's maps. Pages take
// memory when they are first touched. Close returns everything.
func NewMemory(size int64, name string) (*Memory, error) {
	if size <= 0 || size > maxMemory {
		return nil, fmt.Errorf("transfer: memory of %d bytes: the size must be between 1 and %d", size, int64(maxMemory))
	}
	m, err := mapMemory(size, name)
	if err != nil {
		return nil, fmt.Errorf("transfer: memory %q of %d bytes: %w", name, size, err)
	}
	return m, nil
}

// Touch makes every page present now, so that no first use pays for it, and fails if the system has
// not that much memory. It changes no byte.
func (m *Memory) Touch() error {
	if err := touch(m.mapped); err != nil {
		return fmt.Errorf("transfer: cannot make %d bytes of memory present: %w", len(m.mapped), err)
	}
	return nil
}

// Close unmaps the memory. Every endpoint on it must be closed before, and nothing may use Data after.
func (m *Memory) Close() error {
	if m.mapped == nil {
		return nil
	}
	mapped := m.mapped
	m.mapped, m.Data = nil, nil
	return m.unmap(mapped)
}
