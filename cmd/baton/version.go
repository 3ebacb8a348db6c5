package main

import (
	"cmp"
	"runtime/debug"
)

// version is what this binary was built from, as the Go toolchain recorded it.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "baton (unknown build)"
	}
	return describeBuild(info)
}

// describeBuild names the commit or, where there was no repository, the module's version.
func describeBuild(info *debug.BuildInfo) string {
	revision, dirty := "", ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision" && len(s.Value) >= 12:
			revision = s.Value[:12]
		case s.Key == "vcs.modified" && s.Value == "true":
			dirty = "+changes"
		}
	}
	if revision == "" {
		return "baton " + cmp.Or(info.Main.Version, "(devel)") + " " + info.GoVersion + " (built without -buildvcs)"
	}
	return "baton " + revision + dirty + " " + info.GoVersion
}
