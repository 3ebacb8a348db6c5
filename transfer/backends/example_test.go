package backends_test

import (
	"context"
	"fmt"

	"baton/transfer"
	"baton/transfer/backends"
)

// A prefill engine exports a block; a decode engine pulls it into its own pool.
func ExampleOpen() {
	pool := func() (*transfer.Memory, transfer.Puller) {
		mem, err := transfer.NewMemory(1<<20, "example")
		if err != nil {
			panic(err)
		}
		e, err := backends.Open("tcp", mem, backends.Options{})
		if err != nil {
			panic(err)
		}
		return mem, e.(transfer.Puller)
	}
	prefillMem, prefill := pool()
	decodeMem, decode := pool()
	defer prefillMem.Close()
	defer decodeMem.Close()
	defer prefill.Close()
	defer decode.Close()

	copy(prefillMem.Data[4096:], "keys and values")
	secret := []byte("drawn at random by prefill")
	if err := prefill.Export(1, secret, []transfer.Range{{Off: 4096, Len: 4096}}); err != nil {
		panic(err)
	}

	// What Describe returns and the secret reach decode by the control plane.
	h, err := decode.Pull(context.Background(), prefill.Describe(), 1, secret, []transfer.Copy{{Src: 4096, Dst: 0, Len: 4096}})
	if err != nil {
		panic(err)
	}
	<-h.Settled()
	fmt.Println(h.Poll().State == transfer.Done, string(decodeMem.Data[:15]))
	// Output: true keys and values
}
