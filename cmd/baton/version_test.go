package main

import (
	"runtime/debug"
	"testing"
)

func TestVersion(t *testing.T) {
	settings := func(pairs ...string) []debug.BuildSetting {
		var list []debug.BuildSetting
		for i := 0; i < len(pairs); i += 2 {
			list = append(list, debug.BuildSetting{Key: pairs[i], Value: pairs[i+1]})
		}
		return list
	}
	const revision = "0123456789abcdef0123456789abcdef01234567"
	for _, tc := range []struct {
		info debug.BuildInfo
		want string
	}{
		{debug.BuildInfo{GoVersion: "go1.27.3", Settings: settings("vcs.revision", revision, "vcs.modified", "false")}, "baton 0123456789ab go1.27.3"},
		{debug.BuildInfo{GoVersion: "go1.27.3", Settings: settings("vcs.revision", revision, "vcs.modified", "true")}, "baton 0123456789ab+changes go1.27.3"},
		{debug.BuildInfo{GoVersion: "go1.27.3", Main: debug.Module{Version: "v1.2.3"}}, "baton v1.2.3 go1.27.3 (built without -buildvcs)"},
		{debug.BuildInfo{GoVersion: "go1.27.3", Main: debug.Module{Version: "(devel)"}}, "baton (devel) go1.27.3 (built without -buildvcs)"},
	} {
		if got := describeBuild(&tc.info); got != tc.want {
			t.Errorf("got %q, want %q", got, tc.want)
		}
	}
}
