package frontend

import (
	"context"
	"encoding/json/jsontext"
	"errors"
	"strconv"
	"strings"

	"baton/text"
)

// Tokenizer turns text into token ids and back. It is safe for concurrent use.
type Tokenizer interface {
	// Encode returns the ids of a prompt that the client wrote as it is: special tokens spelled out in it
	// become special. addSpecial adds what the model expects around a text (usually BOS).
	Encode(text string, addSpecial bool) ([]int32, error)
	// RenderChat applies the chat template and returns the ids of the result. Special tokens spelled out
	// in message contents stay text. Errors are the request's fault and readable by its sender.
	RenderChat(ctx context.Context, chat *Chat) ([]int32, error)
	// Decode is the text of ids; skipSpecial leaves special tokens out.
	Decode(ids []int32, skipSpecial bool) string
	// TokenBytes is what id stands for: a special token's name, otherwise raw bytes, not always UTF-8.
	TokenBytes(id int32) []byte
	// NewDetokenizer starts an incremental Decode. Special tokens named in except are shown even with skipSpecial.
	NewDetokenizer(skipSpecial bool, except ...string) Detokenizer
}

// Detokenizer decodes one sequence as it grows. It is used by one goroutine.
type Detokenizer interface {
	// Push returns the text that id completes; never a part of a character.
	Push(id int32) string
	// Flush returns what is left at the end, replacement characters included.
	Flush() string
}

// Chat is what a chat template is rendered from: checked JSON, its values as the client wrote them and with members in
// their order.
type Chat struct {
	Messages             []byte // array of objects, without what rollouts carry
	Tools                []byte // array of objects; nil for none
	Documents            []byte // likewise
	Kwargs               []byte // object: further variables of the template; nil for none
	AddGenerationPrompt  bool
	ContinueFinalMessage bool // the answer goes on with the last message

	generationPrompt *bool // add_generation_prompt as given

	raw     []byte   // the array of messages that were read, as the client wrote it, without the bracket that closes it
	written *writing // it behind what is known; nil if nothing is

	// What the client says of ids: see rollout.go.
	prefix     text.Prefix
	required   []int32        // required_prefix_token_ids
	known      int            // messages before the first that was read
	next       jsontext.Value // the first that was read; nil for none
	lastAnswer int            // the last message of the assistant that was read; -1 for none
	vocab      int
	list       struct{ at, size, ids int } // where in written the prompt of prefix is a list, and of how many ids
	cut        cut                         // ids that are left out of a list in what is read
	cutSeen    bool                        // and it is a prompt's
}

var errNoTokenizer = errors.New("this model is served without a tokenizer: send the prompt as token ids to /v1/completions")

// idTokenizer stands in for a model that has no tokenizer: the text of token N is "token_id:N".
type idTokenizer struct{}

const tokenIDPrefix = "token_id:"

func (idTokenizer) Encode(string, bool) ([]int32, error) { return nil, errNoTokenizer }

func (idTokenizer) RenderChat(context.Context, *Chat) ([]int32, error) { return nil, errNoTokenizer }

func (t idTokenizer) Decode(ids []int32, _ bool) string {
	var b strings.Builder
	for _, id := range ids {
		b.Write(t.TokenBytes(id))
	}
	return b.String()
}

func (idTokenizer) TokenBytes(id int32) []byte {
	return strconv.AppendInt([]byte(tokenIDPrefix), int64(id), 10)
}

func (t idTokenizer) NewDetokenizer(bool, ...string) Detokenizer { return t }

func (t idTokenizer) Push(id int32) string { return string(t.TokenBytes(id)) }

func (idTokenizer) Flush() string { return "" }
