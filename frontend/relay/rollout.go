package relay

import (
	"bytes"
	"strconv"
	"strings"
)

// withRollout is a chat answer whose message has what trainers read there: prompt_token_ids, generation_token_ids and
// generation_log_probs, from the answer's own ids and log-probabilities. An answer that lacks any of them, or has more
// than one choice, stays as it is: half of a bundle is worse than none.
func withRollout(answer pieces) pieces {
	top, err := scanObject(answer.join())
	if err != nil {
		return answer
	}
	choices, err := scanArray(top.get("choices"), 1)
	if err != nil || len(choices) != 1 {
		return answer
	}
	choice, err := scanObject(choices[0])
	if err != nil {
		return answer
	}
	message, err := scanObject(choice.get("message"))
	if err != nil || message.getSet("generation_token_ids") != nil {
		return answer
	}
	prompt := top.getSet("prompt_token_ids")
	ids, probs := generated(&choice)
	if prompt == nil || ids == nil {
		return answer
	}
	var inMessage, inChoice, inTop edit
	inMessage.put("prompt_token_ids", prompt)
	inMessage.put("generation_token_ids", ids)
	inMessage.put("generation_log_probs", probs)
	inChoice.put("message", inMessage.apply(&message).join())
	inTop.put("choices", append(append([]byte{'['}, inChoice.apply(&choice).join()...), ']'))
	return inTop.apply(&top)
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
