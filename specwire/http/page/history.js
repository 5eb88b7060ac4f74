// What single looks at the coordinator's counts say together: rates, and shares of the last seconds.

const MOST_LOOKS = 120;
const RECENT_S = 30;

export class History {
  constructor() {
    this.looks = [];
  }

  push(status) {
    const last = this.looks.at(-1);
    // A coordinator that has started anew counts from 0.
    if (last && status.uptime_s < last.uptime_s) this.looks = [];
    this.looks.push(status);
    if (this.looks.length > MOST_LOOKS) this.looks.shift();
  }

  get seconds() {
    return this.looks.length < 2 ? 0 : this.looks.at(-1).uptime_s - this.looks[0].uptime_s;
  }

  // [{uptime_s, ...}] before and after: [tokens a second, ...].
  rates() {
    return this.looks.slice(1).map((look, index) => {
      const before = this.looks[index];
      return (look.num_generated_tokens - before.num_generated_tokens) / Math.max(1e-3, look.uptime_s - before.uptime_s);
    });
  }

  // Largest K of the lanes at each look; of those that run nothing, too.
  drafts() {
    return this.looks.slice(1).map((look) => Math.max(0, ...look.lanes.map((lane) => lane.num_speculative_tokens)));
  }

  // With adaptive verification, verified drafts a step between looks; null where there was no step.
  budgets() {
    return this.looks.slice(1).map((look, index) => {
      const sum = (status, read) => status.lanes.reduce((total, lane) => total + read(lane), 0);
      const difference = (read) => sum(look, read) - sum(this.looks[index], read);
      const steps = difference((lane) => lane.num_steps);
      return steps > 0 ? Math.max(0, difference((lane) => lane.policy.num_kept_tokens)) / steps : null;
    });
  }

  // Acceptance by position of the last seconds, null where nothing was drafted; since the start where nothing was in them.
  acceptance() {
    const now = this.looks.at(-1);
    const before = this.looks.find((look) => look.uptime_s >= now.uptime_s - RECENT_S);
    const recent = difference(now.drafts_per_position, before.drafts_per_position);
    const isRecent = recent[0] > 0;
    const drafts = isRecent ? recent : now.drafts_per_position;
    const accepted = isRecent ? difference(now.accepted_per_position, before.accepted_per_position) : now.accepted_per_position;
    const shares = drafts.map((count, position) => (count > 0 ? accepted[position] / count : null));
    return { shares, counts: drafts, span: drafts[0] > 0 ? (isRecent ? `last ${RECENT_S} s` : "since the start") : "" };
  }
}

function difference(now, before) {
  return now.map((count, position) => count - (before[position] ?? 0));
}
