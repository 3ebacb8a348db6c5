"""What models' own chat templates make of an answer with tool calls: rendered.json.gz.

    python rendered.py FOLDER...     # folders of .jinja files; names that FAMILIES does not list are left out

Only the answers are kept, not the templates.
"""

import copy, gzip, json, pathlib, sys

import templates

# The beginning of a file's name: its formats of calls and of reasoning, and what ends an answer.
FAMILIES = {
    "Qwen3-8B": ("hermes", "think", "<|im_end|>"),
    "Qwen3-VL-30B": ("hermes", "none", "<|im_end|>"),
    "Qwen3.5-35B": ("qwen3_coder", "think", "<|im_end|>"),
    "NVIDIA-Nemotron-3-Super": ("qwen3_coder", "think", "<|im_end|>"),
    "NVIDIA-Nemotron-Nano-v2": ("nemotron", "think", "\n<SPECIAL_12>"),
    "Ministral-3-14B": ("mistral", "none", "<eos>"),
    "Mistral-Medium-3.5": ("mistral", "mistral", "</s>"),
    "mistral_parallel": ("mistral", "none", "<eos>"),
    "deepseek_v3": ("deepseek_v3", "think", "<｜end▁of▁sentence｜>"),
    "DeepSeek-V3.1": ("deepseek_v3", "think", "<｜end▁of▁sentence｜>"),
    "DeepSeek-V4-Flash": ("deepseek_v4", "think", "<｜end▁of▁sentence｜>"),
    "DeepSeek-V4.1": ("deepseek_v4", "think", "<｜end▁of▁sentence｜>"),
    "Llama-3.2-1B": ("llama3_json", "none", "<|eot_id|>"),
}

TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "The weather", "parameters": {
        "type": "object", "properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "b": {"type": "boolean"}, "o": {"type": "object"}}}}},
    {"type": "function", "function": {"name": "noop", "description": "", "parameters": {"type": "object", "properties": {}}}},
]
ARGUMENTS = [{"s": "Zürich </tool_call> \"now\"\n]}", "i": 2, "b": True, "o": {"x": [1, 2.5, None, {"k": "v;"}]}}, {}]
USER = {"role": "user", "content": "Weather?"}


def answer(template, message, end):
    """The message after the prompt, or None if the template does not show it."""
    context = dict(tools=TOOLS, documents=None, bos_token="<bos>", eos_token="<eos>")
    try:
        prompt = template.render(messages=[copy.deepcopy(USER)], add_generation_prompt=True, **context)
        whole = template.render(messages=[copy.deepcopy(USER), copy.deepcopy(message)], add_generation_prompt=False, **context)
    except Exception:
        return None
    # Where the message is rendered without the reasoning that the prompt opens, the prompt is not its beginning.
    text = whole[len(prompt):] if whole.startswith(prompt) else None
    if text is None or "get_weather" not in text or end not in text:
        return None
    return dict(open=prompt.rstrip().endswith(("<think>", "[THINK]")), text=text[:text.rindex(end)])


def main(folders):
    env, out = templates.environment(), []
    for path in sorted(p for f in folders for p in pathlib.Path(f).glob("*.jinja")):
        family = next((v for k, v in FAMILIES.items() if path.name.startswith(k)), None)
        if not family or path.stem in [o["template"] for o in out]:
            continue
        template = env.from_string(path.read_text())
        for count in 1, 2:
            for content in "Let me look.", "", None:
                for encoded in False, True:
                    calls = [{"id": "abcdefgh%d" % i, "type": "function", "function": {
                        "name": t["function"]["name"], "arguments": json.dumps(a, ensure_ascii=False) if encoded else a}}
                        for i, (t, a) in enumerate(zip(TOOLS[:count], ARGUMENTS))]
                    message = {"role": "assistant", "content": content, "reasoning_content": "Hm.", "tool_calls": calls}
                    a = answer(template, message, family[2])
                    # Some templates leave content out.
                    if a and (not content or content in a["text"]):
                        a |= dict(template=path.stem, tools=family[0], reasoning=family[1], content=content or "", calls=count)
                        if a not in out:
                            out.append(a)
                        break  # encoded arguments are for templates that do not format them
    data = json.dumps(dict(tools=TOOLS, arguments=ARGUMENTS, answers=out), ensure_ascii=False)
    (pathlib.Path(__file__).parent / "rendered.json.gz").write_bytes(gzip.compress(data.encode(), mtime=0))
    for o in out:
        print(o["template"], o["calls"], repr(o["content"]), o["open"], repr(o["text"][:100]))


if __name__ == "__main__":
    main(sys.argv[1:])
