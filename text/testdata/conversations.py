"""Long conversations and their ids by Hugging Face at each turn: conversations.json.gz.

    python conversations.py CACHE    # the folder that scripts/fetch-tokenizers prints

Needs transformers. A turn's ids are kept as their number and the SHA-256 of them as little-endian int32.
"""

import gzip, hashlib, json, pathlib, random, struct, sys

from transformers import AutoTokenizer

TURNS = 30
WORDS = """the agent reads a file and returns its lines of code def func return value := error None naïve Zürich 東京 données
123 4567 0xff ... != -> {"a": [1, 2]} <b>x</b> \t tabs \n\n blank lines 🙂 👩‍🚀 e\u0301 || && // /* */ # ## ``` ```python""".split(" ")
TOOLS = [
    {"type": "function", "function": {"name": "run", "description": "Runs a command: \"sh -c\"", "parameters": {
        "type": "object", "properties": {"cmd": {"type": "string", "description": "what to run"}, "timeout": {"type": "number"}}, "required": ["cmd"]}}},
    {"type": "function", "function": {"name": "read", "description": "Reads a file <path>", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array", "items": {"type": "integer"}}}}}},
]


def text(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def turns(rng, tools):
    """What each request adds."""
    yield [{"role": "system", "content": "You are an agent. " + text(rng, 60)}, {"role": "user", "content": text(rng, 30)}]
    for i in range(1, TURNS):
        if not tools or i % 10 == 9:
            yield [{"role": "assistant", "content": text(rng, 40)}, {"role": "user", "content": text(rng, 30)}]
            continue
        calls = [
            {"id": f"call_{i}_{k}", "type": "function", "function": {"name": ("run", "read")[k], "arguments": json.dumps(
                ({"cmd": text(rng, 8), "timeout": 1.5}, {"path": text(rng, 2), "lines": [1, 2]})[k], ensure_ascii=False)}}
            for k in range(1 + (i % 4 == 3))
        ]
        said = {"role": "assistant", "content": text(rng, 20) if i % 3 else "", "tool_calls": calls}
        if i % 5 < 3:
            said["reasoning_content"] = text(rng, 15)
        yield [said] + [{"role": "tool", "tool_call_id": c["id"], "content": text(rng, 60)} for c in calls]


def decoded(messages):
    """What transformers wants: arguments as objects."""
    out = json.loads(json.dumps(messages))
    for m in out:
        for c in m.get("tool_calls", []):
            c["function"]["arguments"] = json.loads(c["function"]["arguments"])
    return out


def main(cache):
    out = []
    for name, tools in ("qwen3", True), ("llama3_1", False), ("deepseek_v3", False):
        folder = pathlib.Path(cache) / name
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rng = random.Random(name)
        messages, record = [], []
        for added in turns(rng, tools):
            messages += added
            rendered = tokenizer.apply_chat_template(decoded(messages), tools=TOOLS if tools else None, add_generation_prompt=True, tokenize=False)
            ids = tokenizer.encode(rendered, add_special_tokens=False)
            record.append({"messages": added, "count": len(ids), "sha256": hashlib.sha256(struct.pack(f"<{len(ids)}i", *ids)).hexdigest()})
        digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        out.append({"tokenizer": name, "sha256": digest, "tools": TOOLS if tools else None, "turns": record})
        print(name, [r["count"] for r in record])
    with gzip.GzipFile("conversations.json.gz", "wb", mtime=0) as f:
        f.write(json.dumps(out, ensure_ascii=False, separators=(",", ":")).encode())


main(*sys.argv[1:])
