// Asks llama.cpp and Baton servers the same questions, as token ids, and times both. See compare-llamacpp.
import { readFileSync } from "node:fs";
import { getLlama } from "node-llama-cpp";

const [what, threads, modelPath, twinPath, pid, served, servedF32, servedTwin] = process.argv.slice(2);
const answerLength = 32;
const questions = [
  "What is the capital of France?", "Name three primary colors.", "How many legs does a spider have?",
  "Write a haiku about the sea.", "What is 12 plus 30?", "Explain gravity to a child.",
  "Translate 'good morning' into Spanish.", "Who wrote Romeo and Juliet?", "List two uses of copper.",
  "What causes rain?", "Give a synonym of happy.", "What is the boiling point of water?",
  "Describe a cat in one sentence.", "What does a compiler do?", "Name a planet larger than Earth.",
  "How do bees make honey?", "Write one line of Python that prints hello.", "What is photosynthesis?",
  "Why is the sky blue?", "Tell me a short joke.",
];

const post = async (address, path, body) => {
  const response = await fetch(`http://${address}${path}`, { method: "POST", body: JSON.stringify({ model: "m", ...body }) });
  if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
  return response.json();
};
const complete = async (address, prompt, max_tokens, extra) => (await post(address, "/v1/completions",
  { prompt, max_tokens, temperature: 0, return_token_ids: true, ignore_eos: true, ...extra })).choices[0];
const baton = async (prompt, n) => (await complete(served, prompt, n)).token_ids;

const llama = await getLlama({ gpu: false, build: "never", logLevel: "error" });
const open = async (path) => {
  const model = await llama.loadModel({ modelPath: path });
  const context = await model.createContext({ contextSize: 1024, threads: Number(threads), batchSize: 512 });
  const sequence = context.getSequence();
  return async (prompt, n) => {
    await sequence.clearHistory();
    const out = [];
    for await (const token of sequence.evaluate(prompt, { temperature: 0, topK: 1, yieldEogToken: true })) {
      out.push(token);
      if (out.length >= n) break;
    }
    return out;
  };
};
const quantised = await open(modelPath);

async function compareAnswers() {
  const dequantised = await open(twinPath);
  const prefix = (a, b) => {
    let n = 0;
    while (n < a.length && n < b.length && a[n] === b[n]) n++;
    return n;
  };
  const numbers = (choice) => [...choice.logprobs.token_logprobs, ...choice.prompt_logprobs.slice(1).map((p) => Object.values(p)[0].logprob)];
  const counts = { f32: 0, q4_1: 0 };
  let sameBits = 0, largest = 0;
  for (const question of questions) {
    const prompt = (await post(served, "/tokenize", { messages: [{ role: "user", content: question }] })).tokens;
    const ours = await baton(prompt, answerLength);
    const [f32, q4] = [await dequantised(prompt, answerLength), await quantised(prompt, answerLength)];
    // llama.cpp ends where the model does; Baton was told to go on.
    const [a, b] = [prefix(ours, f32), prefix(ours, q4)];
    if (a === f32.length) counts.f32++;
    if (b === q4.length) counts.q4_1++;
    const details = { logprobs: 1, prompt_logprobs: 0 };
    const [x, y, z] = [await complete(servedF32, prompt, 24, details), await complete(servedTwin, prompt, 24, details), await complete(served, prompt, 24, details)];
    if (JSON.stringify([x.token_ids, numbers(x)]) === JSON.stringify([y.token_ids, numbers(y)])) sameBits++;
    numbers(x).slice(24).forEach((v, i) => { largest = Math.max(largest, Math.abs(v - numbers(z).slice(24)[i])); });
    console.log(`${String(a).padStart(3)} of ${f32.length} tokens agree with f32, ${String(b).padStart(3)} of ${q4.length} with q4_1: ${question}`);
  }
  console.log(`same bits as dequantised f32 weights (KV f32): ${sameBits} of ${questions.length}`);
  console.log(`largest difference of a prompt log-probability that a bf16 KV cache makes: ${largest.toFixed(4)}`);
  console.log(`greedy answers of llama.cpp on f32 weights, ${answerLength} tokens: ${counts.f32} of ${questions.length} the same`);
  console.log(`greedy answers of llama.cpp on the q4_1 file, ${answerLength} tokens: ${counts.q4_1} of ${questions.length} the same`);
}

async function compareSpeed() {
  // Fresh prompts each time, so that no prefix cache helps; the median of five.
  const median = (values) => values.sort((x, y) => x - y)[values.length >> 1];
  const random = (n, seed) => Array.from({ length: n }, (_, i) => 1000 + ((i * 7919 + seed * 104729) % 40000));
  // Seconds on the clock, and seconds of processor time: of the server (its ticks are 10 ms), and of this process,
  // in which llama.cpp runs.
  const ticks = () => { const f = readFileSync(`/proc/${pid}/stat`, "utf8").split(") ")[1].split(" "); return (Number(f[11]) + Number(f[12])) / 100; };
  const own = () => { const u = process.cpuUsage(); return (u.user + u.system) / 1e6; };
  const timed = async (cpu, f) => {
    const [began, before] = [performance.now(), cpu()];
    await f();
    return { wall: (performance.now() - began) / 1000, cpu: cpu() - before };
  };
  const rates = {};
  for (const name of ["baton", "llama.cpp"]) rates[name] = { prompt: { wall: [], cpu: [] }, decode: { wall: [], cpu: [] } };
  for (let round = 0; round < 5; round++) {
    for (const [name, cpu, run] of [["baton", ticks, baton], ["llama.cpp", own, quantised]]) {
      const first = await timed(cpu, () => run(random(512, round), 1));
      const all = await timed(cpu, () => run(random(512, round + 100), 65));
      for (const unit of ["wall", "cpu"]) {
        rates[name].prompt[unit].push(512 / first[unit]);
        rates[name].decode[unit].push(64 / Math.max(all[unit] - first[unit], 0.01));
      }
    }
  }
  for (const kind of ["prompt", "decode"]) {
    for (const [unit, label] of [["wall", "second"], ["cpu", "processor second"]]) {
      const [ours, theirs] = [median(rates.baton[kind][unit]), median(rates["llama.cpp"][kind][unit])];
      console.log(`${kind} tokens a ${label}, ${threads} threads: baton ${ours.toFixed(0)}, llama.cpp ${theirs.toFixed(0)}, ratio ${(ours / theirs).toFixed(2)}`);
    }
}
}

if (what !== "speed") await compareAnswers();
if (what !== "answers") await compareSpeed();
process.exit(0);
