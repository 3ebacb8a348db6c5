// Package text turns text into token ids and back: byte-level BPE tokenizers read from a Hugging Face
// folder or from GGUF metadata, chat templates, streaming detokenization, stop strings, and parsers that sort
// what a model answers into content, reasoning and tool calls. A prompt can be made to end with the beginning of a call (Opening).
//
// A Tokenizer, a Template and an OutputFormat are immutable and safe for concurrent use; a Detokenizer, a
// StopMatcher and an OutputParser each belong to one stream. Nothing here starts goroutines of its own or touches the network.
//
// # Look-alikes
//
// Text that a client sent may spell out a control token such as "<|im_end|>". It must not end a turn, and
// so has to be told apart from the same text written by the chat template. Added tokens that are
// special, or that have the shape <|...|> of a control token, are protected:
//
//   - Encode matches them only with ParseSpecial. Without it they are encoded as the plain text they are.
//   - Render puts an invisible mark inside each protected look-alike in a client's strings (messages, tools,
//     documents, extra arguments), and inside the beginning of one at a string's end, before the template
//     sees them. The marks follow the text through whatever the template does with it and are removed from
//     the result, which remembers where they were; EncodePrompt matches no protected token across such a
//     place. Everything that the template itself writes is matched as usual.
//
// Text without look-alikes therefore gets the ids that encoding the whole rendered string would give.
// Other added tokens (<think>, <tool_call>) are matched everywhere, as the model's own output has them. A
// template that searches a client's string for a protected token does not find it.
package text
