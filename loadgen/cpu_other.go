//go:build !unix

package loadgen

import "time"

// processCPU is not known here: reports then say that no CPU time was used.
func processCPU() time.Duration { return 0 }
