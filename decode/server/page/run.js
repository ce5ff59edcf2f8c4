// One request as it was decoded: what is drawn, saved and loaded.

import { complete } from "./client.js";

const FORMAT = "d2f page trace 1";

/** A run that has not begun. frames: what each forward did (`d2f` of the chunks), with the text sent
 * up to then. state: waiting, running, done, stopped or failed. shared: ran beside another. */
export function newRun({ model, decoder, options, labels, end_ids }, shared) {
  return {
    model, decoder, options, labels, end_ids, shared,
    state: "waiting", frames: [], text: "", finish_reason: null, usage: null, error: null,
  };
}

/** Decode it; `changed` is called after each chunk. What goes wrong is in the run; an error is
 * returned too. */
export async function record(run, request, signal, changed) {
  run.state = "running";
  changed();
  const body = { model: run.model, decoder: run.decoder, ...run.options, ...request };
  try {
    for await (const chunk of complete(body, signal)) {
      const choice = chunk.choices?.[0];
      run.text += choice?.delta?.content ?? "";
      run.finish_reason = choice?.finish_reason ?? run.finish_reason;
      run.usage = chunk.usage ?? run.usage;
      if (chunk.d2f) run.frames.push({ ...chunk.d2f, text: run.text });
      changed();
    }
    run.state = "done";
  } catch (error) {
    run.state = signal.aborted ? "stopped" : "failed";
    run.error = signal.aborted ? null : error.message;
    changed();
    return error;
  }
  changed();
}

/** What was decided before the first end token, of a frame. */
export function visible(run, frame) {
  const tokens = frame.blocks.flatMap((block) => block.tokens);
  const end = tokens.findIndex((token) => run.end_ids.includes(token));
  return tokens.slice(0, end < 0 ? tokens.length : end).filter((token) => token !== null).length;
}

/** The figures after the first `count` forwards. */
export function figures(run, count) {
  const frames = run.frames.slice(0, count);
  const last = frames.at(-1);
  const tokens = last ? visible(run, last) : 0;
  return {
    forwards: count,
    tokens,
    perForward: count ? tokens / count : 0,
    seconds: last?.seconds ?? 0,
    perSecond: last?.seconds ? tokens / last.seconds : 0,
    fed: frames.reduce((sum, frame) => sum + frame.fed, 0),
  };
}

export function asFile(request, runs) {
  return JSON.stringify({ format: FORMAT, request, runs }) + "\n";
}

/** {request, runs} of a file's text. Throws an Error that says what is wrong with it. */
export function fromFile(text) {
  let found = null;
  try {
    found = JSON.parse(text);
  } catch {
    // said below
  }
  if (found?.format !== FORMAT) throw new Error(`This is no trace that this page saved (${FORMAT}).`);
  const { request, runs } = found;
  const counted = ({ fed, cached, seconds, settled }) =>
    [fed, cached, seconds, settled].every(Number.isFinite);
  const block = ({ tokens, texts }) => tokens.length === texts.length;
  const revealed = ({ confidence }) => Number.isFinite(confidence);
  const frame = (one) =>
    counted(one) && one.blocks.every(block) && one.revealed.every(revealed) && one.revoked.every(Number.isFinite);
  const run = (one) => one.labels && Array.isArray(one.end_ids) && one.frames.every(frame);
  try {
    if (request.messages[0].content.trim() && [1, 2].includes(runs.length) && runs.every(run)) return found;
  } catch {
    // a field is missing: said below
  }
  throw new Error("The trace is damaged: expected a prompt, and one or two runs with their forwards.");
}
