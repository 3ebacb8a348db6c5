package relay

import (
	"bytes"
	"strconv"
	"strings"
)

// rolloutChoices are the choices of a chat answer whose message has what trainers read there: prompt_token_ids,
// generation_token_ids and generation_log_probs, from the answer's own ids and log-probabilities. They are nil for an answer
// that lacks any of these, has more than one choice, or is so already: half of a bundle is worse than none.
func rolloutChoices(answer *object) []byte {
	choices, err := scanArray(answer.get("choices"), 1)
	if err != nil || len(choices) != 1 {
		return nil
	}
	choice, err := scanObject(choices[0])
	if err != nil {
		return nil
	}
	message, err := scanObject(choice.get("message"))
	if err != nil || message.getSet("generation_token_ids") != nil {
		return nil
	}
	prompt := answer.getSet("prompt_token_ids")
	ids, probs := generated(&choice)
	if prompt == nil || ids == nil {
		return nil
	}
	var inMessage, inChoice edit
	inMessage.put("prompt_token_ids", prompt)
	inMessage.put("generation_token_ids", ids)
	inMessage.put("generation_log_probs", probs)
	inChoice.put("message", inMessage.apply(&message).join())
	return append(append([]byte{'['}, inChoice.apply(&choice).join()...), ']')
}

// generated are the ids and log-probabilities of a choice, of equal number, nil if they are not all there. Ids may also
// come as the texts of tokens, "token_id:7".
func generated(choice *object) (ids, probs []byte) {
	logprobs, err := scanObject(choice.get("logprobs"))
	if err != nil {
		return nil, nil
	}
	content, err := scanArray(logprobs.get("content"), 1<<20)
	if err != nil {
		return nil, nil
	}
	named := []byte{'['} // nil once a token has another name
	probs = []byte{'['}
	for i, raw := range content {
		one, err := scanObject(raw)
		if err != nil || one.getSet("logprob") == nil {
			return nil, nil
		}
		if i > 0 {
			probs = append(probs, ',')
		}
		probs = append(probs, one.get("logprob")...)
		named = appendNamed(named, one.get("token"))
	}
	probs = append(probs, ']')
	if list := choice.getSet("token_ids"); list != nil {
		if n := bytes.Count(list, []byte{','}); n != len(content)-1 && (n != 0 || len(content) != 0) {
			return nil, nil
		}
		return list, probs
	}
	if named == nil {
		return nil, nil
	}
	return append(named, ']'), probs
}

// appendNamed appends the id in a token's name to a list of ids, which becomes nil if there is none.
func appendNamed(list, token []byte) []byte {
	text, err := unquote(token)
	number, ok := strings.CutPrefix(text, "token_id:")
	if err != nil || !ok || list == nil {
		return nil
	}
	id, err := strconv.ParseInt(number, 10, 32)
	if err != nil {
		return nil
	}
	if len(list) > 1 {
		list = append(list, ',')
	}
	return strconv.AppendInt(list, id, 10)
}
