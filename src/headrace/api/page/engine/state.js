// What is known of one core: the state that the feed's events describe (api/glass.py says what each of them holds).

export const FREE = -1; // owner of a block that nobody holds
export const NO_NODE = -2; // a block that is not in the prefix index; -1: the first of a prompt
export const PREFILL = 1, DRAFTED = 0; // kinds of rows; 2: decodes
const KEPT_STEPS = 1000, KEPT_SECONDS = 60, KEPT_ENDED = 600, KEPT_TRAIL = 400;
const HUES = 12;

/** A request as it is shown. `trail`: [time, scheduled, tokens] where its counters turned; between them they move evenly. */
function newRequest(id, prompt, priority, arrived) {
  return {
    id, prompt, priority, arrived, slot: -1, cached: 0, scheduled: 0, known: prompt, admitted: 0, first: 0, ended: 0, reason: null,
    output: 0, preemptions: 0, hue: -1, state: "waiting", trail: [], phases: [],
  };
}

/** Tokens that exist of it, read by the host or not. */
export function tokensOf(request) {
  return request.reason ? request.known : Math.max(request.known, request.scheduled + 1);
}

export class State {
  constructor(snapshot) {
    const s = snapshot;
    Object.assign(this, {
      n: s.n, now: s.now, blockSize: s.block_size, numBlocks: s.num_blocks, slotsMost: s.max_num_seqs, budget: s.budget,
      policy: s.policy, decodes: s.decodes, head: s.head, reading: s.reading,
    });
    this.owner = new Int32Array(s.num_blocks).fill(FREE); // the slot that held it first
    this.holders = new Uint16Array(s.num_blocks);
    this.above = new Int32Array(s.num_blocks).fill(NO_NODE);
    this.touched = new Float64Array(s.num_blocks); // when it was taken or given back; 0: before anybody looked
    this.shared = new Map(); // block -> slots, where more than one
    this.tables = new Map(); // slot -> blocks
    this.slots = []; // slot -> request
    this.requests = new Map(); // that wait or run
    this.ended = []; // of the last minute
    this.steps = []; // the last ones
    this.preempted = []; // since the last one
    this.born = 0;
    this.inUse = this.nodes = 0;
    this.tokensIn = this.tokensOut = this.hits = this.asked = this.drafted = this.accepted = 0;
    this.highest = 0; // block that was ever in use or in the index
    this.version = 0; // counts what changed blocks or tree
    for (const row of s.requests) this._known(row);
    for (const [slot, ...blocks] of s.tables) {
      this.tables.set(slot, []);
      for (const block of blocks) this._take(slot, block, 0);
    }
    for (let i = 0; i < s.nodes.length; i += 2) {
      this.above[s.nodes[i]] = s.nodes[i + 1];
      this.highest = Math.max(this.highest, s.nodes[i]);
    }
    this.nodes = s.nodes.length / 2;
    this._seat();
  }

  _known([id, prompt, priority, arrived, slot, cached, scheduled, known, admitted, first, preemptions, reason, output]) {
    const request = newRequest(id, prompt, priority, arrived);
    Object.assign(request, { slot, cached, scheduled, known, admitted, first, preemptions, reason, output });
    if (slot >= 0) {
      request.state = "running";
      request.hue = this.born++ % HUES;
      this.slots[slot] = request;
      request.trail.push([this.now, scheduled, tokensOf(request)]);
    }
    if (admitted) request.phases.push([arrived, "queue"], [admitted, "prefill"]);
    else request.phases.push([arrived, "queue"]);
    if (first) request.phases.push([first, "decode"]);
    if (!reason) this.requests.set(id, request);
  }

  /** As it is now; what never changes afterwards is shared. */
  clone() {
    const other = Object.create(State.prototype);
    Object.assign(other, this);
    for (const name of ["owner", "holders", "above", "touched", "steps", "ended"]) other[name] = this[name].slice();
    other.shared = new Map([...this.shared].map(([block, slots]) => [block, new Set(slots)]));
    other.tables = new Map([...this.tables].map(([slot, blocks]) => [slot, blocks.slice()]));
    const copies = new Map();
    const copy = (request) => {
      if (!request) return request;
      if (!copies.has(request)) copies.set(request, { ...request, trail: request.trail.slice(), phases: request.phases.slice() });
      return copies.get(request);
    };
    other.requests = new Map([...this.requests].map(([id, request]) => [id, copy(request)]));
    other.slots = this.slots.map(copy);
    other.seats = this.seats.map(copy);
    return other;
  }

  get waiting() {
    const found = [...this.requests.values()].filter((request) => request.state === "waiting");
    const rank = this.policy === "priority" ? (request) => request.priority : () => 0;
    return found.sort((a, b) => rank(a) - rank(b) || a.arrived - b.arrived);
  }

  /** Of a step of those who decode now: {seconds} in which it can read what it must, and {tokens} a second; null: not known, or nobody. */
  get limit() {
    let rows = 0, context = 0;
    for (const request of this.requests.values()) {
      if (request.state !== "running" || !request.first) continue;
      rows += 1;
      context += request.scheduled;
    }
    if (!this.reading || !rows) return null;
    const [weights, token, rate] = this.reading, seconds = (weights + token * context) / rate;
    return { seconds, tokens: rows / seconds };
  }

  get cached() {
    let count = 0;
    for (let block = 0; block < this.numBlocks; block++) count += this.above[block] !== NO_NODE && !this.holders[block];
    return count;
  }

  /** The request of this id, or one whose id begins so, running before ended; several HTTP processes put a number before ids. */
  find(id) {
    const fits = (request) => request.id === id || request.id.replace(/^\d+\./, "").startsWith(id);
    return this.requests.get(id) ?? [...this.requests.values()].find(fits) ?? this.ended.findLast(fits) ?? null;
  }

  /** Take a frame: events, and the steps that they belong between. `until`: stop after the step of this number. */
  apply({ events, step }, until = Infinity) {
    const queue = events.slice();
    const happen = (before) => {
      while (queue.length && queue[0][1] < before) this._happens(queue.shift());
    };
    for (const one of step ? step.steps : []) {
      if (one[0] > until) return;
      happen(one[0]);
      this._step(one);
    }
    happen(Infinity);
    if (!step) return;
    for (const block of step.gone) {
      this.above[block] = NO_NODE;
      this.nodes -= 1;
    }
    for (let i = 0; i < step.entered.length; i += 2) {
      this.above[step.entered[i]] = step.entered[i + 1];
      this.nodes += 1;
    }
    if (step.gone.length || step.entered.length) this.version += 1;
    this.head = step.head;
    this.now = step.now;
    while (this.ended.length && (this.ended[0].ended < this.now - KEPT_SECONDS || this.ended.length > KEPT_ENDED)) this.ended.shift();
  }

  _happens([what, , time, id, ...facts]) {
    this.now = Math.max(this.now, time);
    let request = this.requests.get(id);
    if (what === "arrived") {
      request = newRequest(id, facts[0], facts[1], time);
      request.known = facts[0] + facts[2];
      request.phases.push([time, "queue"]);
      this.requests.set(id, request);
      return;
    }
    if (!request) return; // it ended before anybody looked
    if (what === "admitted") {
      const [slot, cached, known] = facts;
      if (!request.admitted) {
        request.admitted = time;
        request.cached = cached;
        this.hits += cached;
        this.asked += known;
      }
      if (request.hue < 0) request.hue = this.born++ % HUES;
      Object.assign(request, { slot, known, scheduled: cached, state: "running" });
      this.slots[slot] = request;
      turn(request, time, cached);
      request.phases.push([time, "prefill"]);
    } else if (what === "first") {
      request.first = time;
      request.phases.push([time, "decode"]);
    } else if (what === "preempted") {
      request.preemptions = facts[0];
      this.preempted = [...this.preempted, request];
      turn(request, time);
      Object.assign(request, { slot: -1, known: tokensOf(request), scheduled: 0, state: "waiting" });
      turn(request, time);
      request.phases.push([time, "queue"]);
    } else {
      const [reason, output] = facts;
      turn(request, time);
      Object.assign(request, { reason, output, ended: time, known: request.prompt + output, state: "ended" });
      this.requests.delete(id);
      this.ended.push(request);
    }
  }

  /** Who is in the rows of plain decodes. */
  _seat() {
    this.seats = this.decodes.map((slot) => this.slots[slot]);
    this.hues = Int8Array.from(this.seats, (request) => (request ? request.hue : 0));
  }

  _step([n, time, times, count, decodes, rows, left, taken, verified]) {
    for (const slot of left) this._leave(slot, time);
    for (let i = 0; i < taken.length; ) {
      const slot = taken[i], column = taken[i + 1], end = i + 3 + taken[i + 2];
      if (column === 0) this.tables.set(slot, []);
      for (i += 3; i < end; i++) this._take(slot, taken[i], time);
    }
    for (let i = 0; i < verified.length; i += 3) this._verified(verified[i], verified[i + 1], verified[i + 2], time);
    if (left.length || taken.length) this.version += 1;
    if (n === this.n) return;
    this.n = n;
    this.now = Math.max(this.now, time);
    if (decodes !== null) {
      this.decodes = decodes;
      this._seat();
    }
    for (const request of this.seats) if (request) request.scheduled += 1;
    this.tokensOut += count;
    const step = { n, time, times, seats: this.seats, hues: this.hues, rows: [], tokens: count, preempted: this.preempted };
    this.preempted = [];
    for (let i = 0; i < rows.length; i += 5) {
      const [slot, kind, start, tokens, drafts] = rows.slice(i, i + 5);
      const request = this.slots[slot];
      step.rows.push({ request, slot, kind, start, tokens, drafts, right: -1 });
      step.tokens += tokens;
      if (kind === PREFILL) this.tokensIn += tokens;
      if (!request) continue;
      if (kind === PREFILL) turn(request, time);
      request.scheduled = start + (kind === PREFILL ? tokens : 1);
      turn(request, time);
    }
    this.steps.push(step);
    if (this.steps.length > KEPT_STEPS) this.steps.splice(0, this.steps.length - KEPT_STEPS);
  }

  _verified(n, slot, tokens, time) {
    const request = this.slots[slot];
    for (let i = this.steps.length - 1; i >= 0 && this.steps[i].n >= n; i--) {
      const row = this.steps[i].n === n && this.steps[i].rows.find((row) => row.slot === slot);
      if (!row) continue;
      row.right = Math.max(0, tokens - 1);
      this.drafted += row.drafts;
      this.accepted += row.right;
    }
    this.tokensOut += tokens;
    if (request && request.state === "running") {
      request.scheduled += tokens - 1;
      turn(request, time);
    }
  }

  _take(slot, block, time) {
    this.tables.get(slot).push(block);
    this.touched[block] = time;
    this.highest = Math.max(this.highest, block);
    if (this.holders[block]++ === 0) {
      this.owner[block] = slot;
      this.inUse += 1;
    } else {
      if (!this.shared.has(block)) this.shared.set(block, new Set([this.owner[block]]));
      this.shared.get(block).add(slot);
    }
  }

  _leave(slot, time) {
    for (const block of this.tables.get(slot) ?? []) {
      const others = this.shared.get(block);
      if (--this.holders[block] === 0) {
        this.owner[block] = FREE;
        this.touched[block] = time;
        this.inUse -= 1;
      }
      if (!others) continue;
      others.delete(slot);
      if (others.size < 2) this.shared.delete(block);
      if (others.size) this.owner[block] = others.values().next().value;
    }
    this.tables.delete(slot);
  }
}

function turn(request, time, scheduled = request.scheduled) {
  request.trail.push([time, scheduled, tokensOf(request)]);
  if (request.trail.length > KEPT_TRAIL) request.trail.splice(1, request.trail.length - KEPT_TRAIL); // the first says where it began
}
