package handoff

import (
	"encoding/binary"
	"errors"
)

// maxTags bounds what a peer can claim: one tag for each pair of ranks of which one gives the other something.
const maxTags = 1 << 14

// packTags puts the tags of all legs of a template, in order, into the one that the control plane carries: each is
// preceded by its length as a uvarint.
func packTags(tags [][]byte) []byte {
	var packed []byte
	for _, tag := range tags {
		packed = binary.AppendUvarint(packed, uint64(len(tag)))
		packed = append(packed, tag...)
	}
	return packed
}

var errTags = errors.New("the tag is malformed")

// unpackTags is the inverse. The tags share packed's memory.
func unpackTags(packed []byte) ([][]byte, error) {
	var tags [][]byte
	for len(packed) > 0 {
		n, size := binary.Uvarint(packed)
		if size <= 0 || n > uint64(len(packed)-size) || len(tags) == maxTags {
			return nil, errTags
		}
		end := size + int(n)
		tags = append(tags, packed[size:end:end])
		packed = packed[end:]
	}
	return tags, nil
}
