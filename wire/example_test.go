package wire_test

import (
	"fmt"

	"baton/wire"
)

// Two ends within one process. Between processes Dial and Accept take the place of Pair.
func ExamplePair() {
	engine, coordinator, err := wire.Pair(wire.Options{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer coordinator.Close()
	if err := engine.Send(&wire.KVReadDone{ID: 7}); err != nil {
		fmt.Println(err)
	}
	engine.Close() // what was sent still arrives

	for {
		m, err := coordinator.Recv()
		if err != nil {
			fmt.Println(err)
			return
		}
		switch m := m.(type) {
		case *wire.KVReadDone:
			fmt.Println("decode is done with request", m.ID)
		default:
			fmt.Println("ignored:", m.Header())
		}
	}
	// Output:
	// decode is done with request 7
	// EOF
}
