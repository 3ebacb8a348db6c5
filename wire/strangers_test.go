package wire

import (
	"bytes"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestRefusalsDoNotFillTheLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		s := NewStrangers(1, slog.New(slog.NewTextHandler(&log, nil)))
		for range 1000 {
			s.Refused(&net.TCPAddr{}, io.EOF)
		}
		time.Sleep(time.Second)
		s.Refused(&net.TCPAddr{}, io.EOF)
		if text := log.String(); strings.Count(text, "\n") != 2 || !strings.Contains(text, "others=999") {
			t.Error(text)
		}
	})
}

// The oldest stranger makes room, and what leaves is counted out once.
func TestOldestStrangerGoes(t *testing.T) {
	s := NewStrangers(2, slog.New(slog.DiscardHandler))
	var leave []func()
	var others []net.Conn
	for range 3 {
		ours, theirs := net.Pipe()
		defer ours.Close()
		leave, others = append(leave, s.Enter(ours)), append(others, theirs)
	}
	if _, err := others[0].Read(make([]byte, 1)); err != io.EOF || s.Len() != 2 {
		t.Errorf("the first of three: %v; %d are left", err, s.Len())
	}
	for i, want := range []int{2, 1, 0} {
		if leave[i](); s.Len() != want {
			t.Errorf("%d after %d have left, want %d", s.Len(), i+1, want)
		}
	}
}
