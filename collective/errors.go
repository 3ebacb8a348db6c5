package collective

import (
	"errors"
	"fmt"
	"strings"
)

// ErrClosed is the cause of a FailedError when a member that is needed has closed its World.
var ErrClosed = errors.New("it has closed its membership")

var errUnexplained = errors.New("it gave no reason")

// FailedError is the end of a world. Err is one of the types below, ErrClosed, what Fail was called with, or,
// when it happened in another process, a RemoteError.
type FailedError struct {
	Rank int // who failed, or found the failure
	Err  error
}

func (e *FailedError) Error() string {
	return fmt.Sprintf("collective: rank %d failed: %v", e.Rank, e.Err)
}

// Unwrap returns the reason.
func (e *FailedError) Unwrap() error { return e.Err }

// RemoteError is a failure in another process, in its words.
type RemoteError struct{ Reason string }

func (e *RemoteError) Error() string { return e.Reason }

// MismatchError is two members of a group whose operations do not fit together.
type MismatchError struct {
	Group        string
	RankA, RankB int
	A, B         string // what each called
}

func (e *MismatchError) Error() string {
	return fmt.Sprintf("the members of group %q call operations that do not fit together: rank %d %s, rank %d %s", e.Group, e.RankA, e.A, e.RankB, e.B)
}

// DeadlockError is a circle of ranks, each waiting for the next.
type DeadlockError struct{ Waits []string }

func (e *DeadlockError) Error() string {
	return "ranks wait for each other: " + strings.Join(e.Waits, ", ")
}

// OperandError is an operation that was called with arguments that are no good by themselves.
type OperandError struct {
	Group, Op string
	Reason    string
}

func (e *OperandError) Error() string {
	return fmt.Sprintf("%s in group %q: %s", e.Op, e.Group, e.Reason)
}

// GroupError is a group that cannot be.
type GroupError struct {
	Group  string
	Ranks  []int
	Reason string
}

func (e *GroupError) Error() string {
	return fmt.Sprintf("group %q of ranks %v: %s", e.Group, e.Ranks, e.Reason)
}

// LostError is a process whose connection broke, fell silent, or carried nonsense.
type LostError struct {
	Ranks []int  // that it runs
	Addr  string // of the connection's other end
	Err   error
}

func (e *LostError) Error() string {
	return fmt.Sprintf("its process (%s at %s) is lost: %v", rankList(e.Ranks), e.Addr, e.Err)
}

// Unwrap returns what happened to the connection.
func (e *LostError) Unwrap() error { return e.Err }

// rankList writes ranks for people: "ranks 0-2, 5".
func rankList(ranks []int) string {
	var b strings.Builder
	b.WriteString("rank")
	if len(ranks) != 1 {
		b.WriteByte('s')
	}
	sep := " "
	for i := 0; i < len(ranks); {
		j := i + 1
		for j < len(ranks) && ranks[j] == ranks[j-1]+1 {
			j++
		}
		fmt.Fprintf(&b, "%s%d", sep, ranks[i])
		if j > i+1 {
			fmt.Fprintf(&b, "-%d", ranks[j-1])
		}
		i, sep = j, ", "
	}
	return b.String()
}
