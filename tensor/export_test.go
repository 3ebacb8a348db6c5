package tensor

// The parsers behind the two Open functions, for tests that hold a file in memory.
var (
	ParseSafetensors = parseSafetensors
	ParseGGUF        = parseGGUF
)
