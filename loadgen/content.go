package loadgen

import (
	"math/rand/v2"
	"strconv"
	"strings"
)

// piece is the first so many tokens of an endless random sequence that key names.
type piece struct {
	key    uint64
	tokens int
}

// pieces are what a turn adds to the prompt. session and turn name what is its own; without a session its key is ownKey.
func (t *Turn) pieces(session string, turn int) []piece {
	var list []piece
	if t.Prefix > 0 {
		list = append(list, piece{sharedKey, t.Prefix})
	}
	own := t.Own
	for i, id := range t.HashIDs {
		n := t.HashBlock
		if i == len(t.HashIDs)-1 && own < 0 {
			n, own = n+own, 0
		}
		list = append(list, piece{keyOf("block", id), n})
	}
	if own > 0 {
		key := ownKey
		if session != "" {
			key = keyOf("own", session, turn)
		}
		list = append(list, piece{key, own})
	}
	return list
}

// sharedKey names what all sessions begin with, ownKey what only one has.
var (
	sharedKey = keyOf("shared")
	ownKey    = keyOf("own")
)

// lowest is the first id that prompts are made of: those below it are often padding, beginning and end.
const lowest = 3

// content makes prompts out of pieces.
type content struct {
	seed  uint64
	vocab int // ids are below
}

func (c content) sequence(p piece, each func(id int32)) {
	rng := rand.New(rand.NewPCG(c.seed, p.key))
	for range p.tokens {
		each(lowest + rng.Int32N(int32(c.vocab-lowest)))
	}
}

// appendIDs appends ids as elements of a JSON array that is not empty unless b is.
func (c content) appendIDs(b []byte, p piece) []byte {
	c.sequence(p, func(id int32) {
		if len(b) > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(id), 10)
	})
	return b
}

// appendWords appends about as many words, with a space before each: most tokenizers make one token of each.
func (c content) appendWords(b []byte, p piece) []byte {
	c.sequence(p, func(id int32) {
		b = append(b, ' ')
		b = append(b, words[int(id)%len(words)]...)
	})
	return b
}

var words = strings.Fields(`the of and to in is that it was for on are as with they at be this from have or by one had not but
what all were when we there can an your which their if do will each how them then she many some so these would other into has more
her two like him see time could no make than first been its who now people my made over did down only way find use may water long
little very after called just where most know get through back much before go good new write our used me man too any day same right
look think also around another came come work three word must because does part even place well such here take why things help put
years different away again off went old number great tell men say small every found still between name should home big give air line
set own under read last never us left end along while might next sound below saw something thought both few those always looked show
large often together asked house world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far hand high year mother light parts
country father let night following picture being study second eyes soon times story boys since white days ever paper hard near
sentence better best across during today others however sure means knew it's try told young miles sun ways thing whole hear example
heard several change answer room sea against top turned learn point city play toward five using himself usually`)
