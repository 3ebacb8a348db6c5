//go:build race

package coordinator

func init() { memoryRequests = 10_000 } // the detector makes the test ten times slower
