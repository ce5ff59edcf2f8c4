// Draws a run after some of its forwards into a pane.

import { make, shape } from "./elements.js";
import { figures } from "./run.js";

const STATES = ["waiting", "semi-active", "fully active", "to cache", "cached", "decoded"];
const END = "▪";

/** The first `cursor` forwards of a run. scale: {forwards, rows}, the most of all panes. */
export function draw(pane, run, cursor, scale) {
  const find = (selector) => pane.querySelector(selector);
  const count = Math.min(cursor, run.frames.length);
  const frame = run.frames[count - 1];
  const now = figures(run, count);
  find(".state").replaceChildren(...stateOf(run, count));
  const said = run.error ?? run.usage?.d2f?.notice ?? ""; // why an answer is empty
  find(".error").hidden = !said;
  find(".error").textContent = said;
  const blocks = frame ? blocksOf(run, frame, run.frames[count - 2]) : [];
  find(".blocks").replaceChildren(...blocks);
  find(".blocks").ariaLabel = frame
    ? `Blocks after forward ${count}: ${frame.revealed.length} tokens decided in it`
    : "No blocks yet";
  find(".states").replaceChildren(...(frame ? legendOf(run, frame) : []));
  find(".counters").replaceChildren(...countersOf(now));
  find(".shared").hidden = !run.shared;
  drawRows(find(".rows"), run, count, scale);
  find("figcaption").replaceChildren(...captionOf(frame, scale));
  const over = run.state !== "running" && count === run.frames.length;
  find(".text").textContent = over ? run.text : (frame?.text ?? "");
  find(".text").scrollTop = find(".text").scrollHeight;
  follow(find(".blocks"));
}

/** Scroll the blocks so that the last cell that changed is in view. */
function follow(box) {
  const changed = [...box.querySelectorAll(".fresh, .revoked")].at(-1)?.getBoundingClientRect();
  const { top, bottom } = box.getBoundingClientRect();
  if (changed?.bottom > bottom) box.scrollTop += changed.bottom - bottom + 8;
  else if (changed?.top < top) box.scrollTop -= top - changed.top + 24;
}

function stateOf(run, count) {
  const seed = run.usage?.d2f?.seed; // null for a greedy one
  const words = {
    waiting: "not run yet",
    running: "running",
    done: `finished: ${run.finish_reason}${seed == null ? "" : `, seed ${seed}`}`,
    stopped: "stopped",
    failed: "failed",
  };
  const all = run.frames.length;
  const word = run.state !== "running" && count < all ? `forward ${count} of ${all}` : words[run.state];
  const badge = make("span", { className: "badge", data: { state: run.state } }, word);
  return [`${run.model} · ${run.decoder} `, badge];
}

/** Each block with its number, its state in the decoder's words, and its cells. */
function blocksOf(run, frame, before) {
  const fresh = new Set(frame.revealed.map(({ position }) => position));
  const revoked = new Set(frame.revoked);
  const was = textsOf(run, before);
  let ended = false;
  return frame.blocks.map((block, number) => {
    const cells = block.tokens.map((token, i) => {
      const position = block.start + i;
      const isEnd = run.end_ids.includes(token);
      const marks = [
        token === null ? "masked" : position < frame.settled ? "settled" : "decided",
        (isEnd || ended) && token !== null && "end",
        fresh.has(position) && "fresh",
        revoked.has(position) && "revoked",
      ].filter(Boolean);
      ended ||= isEnd;
      const text = textOf(run, token, block.texts[i]);
      const old = revoked.has(position) ? was.get(position) : null;
      const title = titleOf(position, text, marks, frame, old);
      return make("span", { className: ["cell", ...marks].join(" "), title }, text ?? old ?? "");
    });
    const label = run.labels[block.state] ?? block.state;
    return make(
      "div",
      { className: "block", data: { state: block.state } },
      make("span", { className: "block-label" }, `${number + 1} ${label}`),
      make("span", { className: "cells" }, ...cells),
    );
  });
}

/** What a cell shows at each position of a frame. */
function textsOf(run, frame) {
  const entries = (frame?.blocks ?? []).flatMap((block) =>
    block.tokens.map((token, i) => [block.start + i, textOf(run, token, block.texts[i])]),
  );
  return new Map(entries);
}

/** A token's text with its white space to be seen, a mark for an end token, null for a mask. */
function textOf(run, token, text) {
  if (token === null) return null;
  if (run.end_ids.includes(token)) return END;
  const lines = text.replaceAll("\n", "↵");
  return lines.trim() === "" ? lines.replaceAll(" ", "␣") : lines;
}

function titleOf(position, text, marks, frame, old) {
  const found = frame.revealed.find((one) => one.position === position);
  const parts = [`position ${position}: ${text ?? ""} ${marks[0]}`];
  if (found) parts.push(`probability ${found.confidence.toFixed(2)}`);
  if (old) parts.push(`${old} taken back`);
  return parts.join(", ");
}

function legendOf(run, frame) {
  const there = STATES.filter((state) => frame.blocks.some((block) => block.state === state));
  return there.map((state) => {
    const many = frame.blocks.filter((block) => block.state === state).length;
    const label = `${many} ${run.labels[state] ?? state}`;
    return make("li", { className: "block-key", data: { state } }, label);
  });
}

function countersOf(now) {
  const rows = [
    ["Forwards", now.forwards],
    ["Visible tokens", now.tokens],
    ["Tokens a forward", now.perForward.toFixed(2)],
    ["Tokens a second", now.perSecond.toFixed(1)],
    ["Rows fed", now.fed],
    ["Seconds", now.seconds.toFixed(3)],
  ];
  return rows.map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value))),
  );
}

/** A bar for each forward: rows fed at the bottom, rows already cached above; later ones are pale. */
function drawRows(svg, run, count, scale) {
  svg.setAttribute("viewBox", `0 0 ${10 * scale.forwards} ${scale.rows}`);
  const bars = run.frames.flatMap(({ fed, cached }, i) => {
    const when = i < count - 1 ? "past" : i === count - 1 ? "current" : "later";
    const bar = (name, y, height) =>
      shape("rect", { class: `${name} ${when}`, x: 10 * i + 1, y, width: 8, height });
    const top = scale.rows - fed - cached;
    return [bar("fed", scale.rows - fed, fed), bar("cached", top, cached)];
  });
  svg.replaceChildren(...bars);
  const frame = run.frames[count - 1];
  svg.setAttribute("aria-label", frame ? rowsOf(frame) : "No forwards yet");
}

function rowsOf({ forward, fed, cached }) {
  return `forward ${forward}: ${fed} rows fed, ${cached} already cached`;
}

function captionOf({ fed = 0, cached = 0 } = {}, scale) {
  const key = (name, text) => make("span", { className: `row-key ${name}` }, text);
  return [key("fed", `${fed} rows fed`), key("cached", `${cached} cached`), `scale: ${scale.rows} rows`];
}
