// Five scenes that show what an engine does, with requests of their own. Each step says what will be seen, does it, and tells what was measured.

import { duration } from "./message.js";
import { longestPause, tokensBetween, ttft, usualPause } from "./stage.js";

const number = (value) => new Intl.NumberFormat("en").format(value);
const salt = () => `Day ${Math.floor(Math.random() * 1e9)}. `;
const word = (text) => text.length > 60 ? `${text.slice(0, 60)}...` : text;

/** A step that cannot be done here: `words` say why, `command` what to start instead. */
const instead = (words, command = null) => ({ words, command, stops: true });

// ---------------------------------------------------------------- 1

const prefix = {
  id: "prefix", tour: "blocks", title: "A prefix that is there already",
  promise: "Two prompts begin alike. The second one's beginning is not computed again.",
  steps: [
    {
      title: "A long prompt, for the first time",
      text: "Its tokens are computed, and their keys and values stay in blocks of the cache. In the engine's view its blocks get a colour, and the tree of prefixes a new branch.",
      async run(stage, memory) {
        const { max_model_len, prefix_caching } = stage.server;
        if (!prefix_caching) return instead("This server keeps no prefixes: it was started with --no-enable-prefix-caching.");
        memory.size = Math.max(32, Math.min(1536, Math.floor(max_model_len * 0.6), Math.floor((stage.capacity ?? 4096) / 3)));
        memory.ids = await stage.ids(memory.size, salt());
        memory.first = await stage.complete(memory.ids, { max_tokens: 8 });
        return { result: memory.first, facts: [["prompt", `${number(memory.size)} tokens`], ["found in the cache", number(memory.first.cached)], ["first token after", duration(ttft(memory.first))]] };
      },
    },
    {
      title: "The same beginning, another end",
      text: "The last 16 tokens are others. All whole blocks before them are found in the tree: its counter of computed tokens starts there, not at 0.",
      async run(stage, memory) {
        const other = await stage.ids(16, "Now tell me: ");
        const second = await stage.complete([...memory.ids.slice(0, -16), ...other], { max_tokens: 8 });
        const share = Math.round((100 * second.cached) / second.prompt);
        return {
          result: second,
          facts: [["found in the cache", `${number(second.cached)} of ${number(second.prompt)} tokens, ${share} %`], ["first token after", duration(ttft(second))], ["before", duration(ttft(memory.first))]],
          words: second.cached ? "" : "Nothing was found. Perhaps others filled the cache in between, or another core took the request.",
        };
      },
    },
    {
      title: "Another beginning, the same end",
      text: "Now one sentence is put in front. Keys and values depend on all that stands before them, so nothing of the old ones is of use.",
      async run(stage, memory) {
        const third = await stage.complete(await stage.ids(memory.size, salt()), { max_tokens: 8 });
        return {
          result: third,
          facts: [["found in the cache", `${number(third.cached)} of ${number(third.prompt)} tokens`], ["first token after", duration(ttft(third))]],
          words: "This is why a system message should come first and stay the same, and what changes (a date, a user's name) last.",
        };
      },
    },
  ],
};

// ---------------------------------------------------------------- 2

const chunks = {
  id: "chunks", tour: "4-a-step", title: "A long prompt beside a running answer",
  promise: "A step has a budget of tokens. Long prompts are cut to fit, so that those who are being answered go on.",
  steps: [
    {
      title: "Somebody is being answered",
      text: "A short prompt and a long answer: one token in each step. In the engine's view it is a narrow cell in every strip.",
      async run(stage, memory) {
        const most = Math.min(1024, stage.server.max_model_len - 64);
        memory.answer = { times: [] };
        const enough = new Promise((done, failed) => {
          memory.whole = stage.complete(`${salt()}Once upon a time`, {
            max_tokens: most, ignore_eos: true,
            onToken: (result) => { memory.answer = result; if (result.output >= 24) done(); },
          });
          memory.whole.then(done, failed);
        });
        await enough;
        memory.usual = usualPause(memory.answer);
        return { result: memory.answer, facts: [["between two tokens", duration(memory.usual)]], words: "It goes on while the next step is done." };
      },
    },
    {
      title: "Somebody else brings a long prompt",
      text: "It is computed in pieces, each as large as the step's budget leaves room for, beside the token of the answer above.",
      async run(stage, memory) {
        const { budget, max_model_len } = stage.server;
        const size = Math.min(max_model_len - 16, 4 * budget, Math.floor((stage.capacity ?? 65536) / 2));
        const long = await stage.complete(await stage.ids(size, salt()), { max_tokens: 4 });
        const from = long.began, to = long.times[0];
        const alone = memory.answer.over ? " The answer above had ended before, so nobody was disturbed: try a larger model or a longer prompt." : "";
        return {
          result: long,
          facts: [
            ["the prompt", `${number(size)} tokens`], ["a step's budget", `${number(budget)} tokens`], ["pieces, at least", number(Math.ceil(size / budget))],
            ["its first token after", duration(ttft(long))], ["tokens of the answer meanwhile", number(tokensBetween(memory.answer, from, to))],
            ["its longest pause", `${duration(longestPause(memory.answer, from, to))}, usually ${duration(memory.usual)}`],
          ],
          words: (size <= budget ? `The whole prompt fits into one step here; with \`--max-num-batched-tokens ${Math.max(64, Math.floor(size / 8))}\` it comes in pieces, and the pause gets shorter.` : "A smaller budget makes the pause shorter and the long prompt slower; --max-itl-ms chooses it by a time.") + alone,
        };
      },
    },
  ],
};

// ---------------------------------------------------------------- 3

const MOST_PROMPT_TOKENS = 40_000; // that a scene may have computed
const WISHED_OUTPUT = 640, GUESS = 256; // tokens: what each will write, and what the scheduler expects of a request it knows nothing of

/** How many requests of which size fill the cache and then outgrow it; null: it would take too much. */
export function crowd({ max_num_seqs, max_model_len }, capacity) {
  for (const count of [8, 12, 16, 24, 32, 48, 64]) {
    if (count > max_num_seqs) break;
    const output = Math.min(WISHED_OUTPUT, Math.floor(max_model_len / 2));
    const prompt = Math.min(max_model_len - output, Math.max(16, Math.floor(capacity / count) - GUESS));
    if (count * (prompt + output) > 1.15 * capacity && count * prompt <= MOST_PROMPT_TOKENS && prompt + output <= capacity) return { count, prompt, output };
  }
  return null;
}

const preemption = {
  id: "preemption", tour: "4-a-step", title: "When the cache is full",
  promise: "Answers grow longer than was foreseen. One request gives its blocks back, waits, and goes on with the very same tokens.",
  steps: [
    {
      title: "More than fits",
      text: "Many requests are admitted, since each is expected to end soon. They do not, and the blocks run out: the youngest is preempted. In the engine's view its blocks turn pale, and it is back in the queue.",
      async run(stage, memory) {
        const plan = stage.capacity === null ? null : crowd(stage.server, stage.capacity);
        if (plan === null) {
          const bytes = 2048 * (stage.server.kv_token_bytes ?? 32768);
          return instead(
            `The cache of this server is too large for a scene: it has room for ${number(stage.capacity ?? 0)} tokens, and filling it would take more than ${number(MOST_PROMPT_TOKENS)} tokens of prompts, or more requests than run at a time. Start a server with a small one:`,
            `headrace serve --port 8001 --max-model-len 1024 --kv-cache-bytes ${bytes}`,
          );
        }
        const before = stage.server.counters.preemptions;
        memory.plan = plan;
        memory.prompts = await Promise.all(Array.from({ length: plan.count }, () => stage.ids(plan.prompt, salt())));
        // in one body: they arrive together, and browsers have few connections
        memory.crowd = await stage.complete(memory.prompts, { max_tokens: plan.output, ignore_eos: true, seed: 1 });
        const count = (await stage.look()).counters.preemptions - before;
        return {
          result: memory.crowd,
          facts: [
            ["requests at once", number(plan.count)], ["each", `${number(plan.prompt)} tokens of prompt, ${number(plan.output)} of answer`],
            ["the cache", `${number(stage.capacity)} tokens`], ["preempted", count === 1 ? "once" : `${number(count)} times`], ["answers that are whole", number(memory.crowd.ends.filter((reason) => reason === "length").length)],
          ],
          words: count ? "" : "Nobody had to be preempted this time: the scheduler has learned from earlier answers how long they get, and let fewer in at once.",
        };
      },
    },
    {
      title: "Nothing was lost",
      text: "The last request to come is sent once more, now alone. Random numbers are counted, not drawn, so its tokens depend on its prompt and its seed only.",
      async run(stage, memory) {
        const alone = await stage.complete(memory.prompts.at(-1), { max_tokens: memory.plan.output, ignore_eos: true, seed: 1 });
        const same = alone.texts[0] === memory.crowd.texts.at(-1);
        return {
          result: alone, facts: [["the text", same ? "the same, to the last character" : "differs"]],
          words: same ? "" : "In 16-bit arithmetic two tokens can be so near to each other that the shape of a batch decides between them.",
        };
      },
    },
  ],
};

// ---------------------------------------------------------------- 4

const SCHEMA = {
  type: "object", additionalProperties: false, required: ["name_of_the_river", "name_of_the_mill", "is_it_grinding_today"],
  properties: { name_of_the_river: { enum: ["Thames", "Danube"] }, name_of_the_mill: { enum: ["Upper Mill", "Lower Mill"] }, is_it_grinding_today: { type: "boolean" } },
};

const speculation = {
  id: "speculation", tour: "10-speculation", title: "Several tokens in a step",
  promise: "What can be guessed is verified all at once; what is wrong costs nothing but the guess.",
  steps: [
    {
      title: "Guesses that a grammar makes certain",
      text: "An answer must be JSON of a given form. Where the form leaves no choice, its tokens are drafted and verified in one step. In the engine's view they are accepted cells beside each other.",
      async run(stage) {
        if (!stage.server.structured_output) return { facts: [], words: "This server has no grammars (pip install llguidance), so this step is left out." };
        const before = stage.server.counters;
        const result = await stage.stream("v1/chat/completions", {
          model: stage.model, messages: [{ role: "user", content: "Describe a mill as JSON." }], max_tokens: 128, temperature: 0, stream: true,
          stream_options: { include_usage: true, continuous_usage_stats: true },
          response_format: { type: "json_schema", json_schema: { name: "mill", schema: SCHEMA } },
        });
        return { result, facts: [["the answer", word(result.texts[0])], ...drafted(before, (await stage.look()).counters, result)] };
      },
    },
    {
      title: "Guesses from the text itself",
      text: "Where an answer repeats what has been there, the tokens that followed then are the guess. A draft model guesses the same way, for any text.",
      async run(stage) {
        const method = stage.server.speculative_method;
        if (!method) return instead("This server guesses nothing of its own accord. One that does:", "headrace serve --port 8001 --speculative-method ngram");
        const before = stage.server.counters;
        const list = Array.from({ length: 12 }, (_, i) => `${i + 1}. The miller opens the gate and the water turns the wheel.`).join("\n");
        const result = await stage.complete(`${salt()}\n${list}\n13.`, { max_tokens: Math.min(160, stage.server.max_model_len - 400), ignore_eos: true });
        return { result, facts: [["method", method], ...drafted(before, (await stage.look()).counters, result), ["between two tokens", duration(usualPause(result))]] };
      },
    },
  ],
};

function drafted(before, after, result) {
  const drafts = after.draft_tokens - before.draft_tokens, right = after.accepted_tokens - before.accepted_tokens;
  const share = drafts ? `${number(right)} of ${number(drafts)}, ${Math.round((100 * right) / drafts)} %` : "none were made";
  return [["tokens", number(result.output)], ["drafts that were right", share], ["steps of the engine", number(after.steps - before.steps)]];
}

// ---------------------------------------------------------------- 5

const killed = {
  id: "killed", tour: "12-when-the-core-dies", title: "A core is killed",
  promise: "The process that computes is ended in the middle of an answer. The answer goes on in another, with the same tokens.",
  steps: [
    {
      title: "An answer, undisturbed",
      text: "First the whole answer, to compare with.",
      async run(stage, memory) {
        if (!stage.server.kill_core) {
          return instead(
            "This server does not let its page kill anything, and should not where others use it. One of your own, on this machine, can be told to:",
            "headrace serve --port 8001 --allow-kill-core",
          );
        }
        memory.prompt = `${salt()}The miller's daughter went down to the river, and there she saw`;
        memory.tokens = Math.min(200, stage.server.max_model_len - 64);
        memory.whole = await stage.complete(memory.prompt, { max_tokens: memory.tokens, ignore_eos: true, seed: 1 });
        return { result: memory.whole, facts: [["tokens", number(memory.whole.output)], ["took", duration(memory.whole.times.at(-1) - memory.whole.began)]] };
      },
    },
    {
      title: "The same, and kill -9 after a quarter of it",
      text: "The server sees the process end, and has another at hand that has imported everything already: it loads the weights, gets prompt and tokens so far, and goes on.",
      async run(stage, memory) {
        let done = false;
        const cut = await stage.complete(memory.prompt, {
          max_tokens: memory.tokens, ignore_eos: true, seed: 1,
          onToken: (result) => {
            if (done || result.output < memory.tokens / 4) return;
            done = true;
            memory.killing = stage.killCore();
          },
        });
        await memory.killing;
        const { restarts } = (await stage.look()).counters;
        const same = cut.texts[0] === memory.whole.texts[0];
        return {
          result: cut,
          facts: [
            ["tokens", number(cut.output)], ["the longest pause", duration(longestPause(cut))], ["cores started anew", number(restarts)],
            ["the text", same ? "the same, to the last character" : "differs"],
          ],
          words: same ? "The connection never broke: whoever reads the stream sees a pause, and nothing else." : "In 16-bit arithmetic two tokens can be so near to each other that the shape of a batch decides between them.",
        };
      },
    },
  ],
};

export const SCENES = [prefix, chunks, preemption, speculation, killed];
