// The page: asks, runs the panes' requests, and shows the forward that the player is at.

import { Choice, firstPairs } from "./choice.js";
import { examples, models, useKey } from "./client.js";
import { make } from "./elements.js";
import { Player } from "./player.js";
import { asFile, figures, fromFile, newRun, record } from "./run.js";
import { draw } from "./view.js";

const UNAUTHORISED = 401;
const at = (id) => document.getElementById(id);

let panes = []; // {element, choice}
let runs = []; // one a pane: what is shown
let asked = {}; // the request that they share
let abort = null; // of the requests that run
let drawing = 0;
const player = new Player(redraw);

/** Draw once in the next frame of the screen, however much has changed until then. */
function redraw() {
  drawing ||= requestAnimationFrame(() => {
    drawing = 0;
    const frames = runs.flatMap((run) => run.frames);
    const scale = {
      forwards: Math.max(1, ...runs.map((run) => run.frames.length)),
      rows: frames.reduce((most, { fed, cached }) => Math.max(most, fed + cached), 1),
    };
    panes.forEach(({ element, choice }, i) => {
      draw(element, runs[i] ?? newRun(chosen(choice)), player.cursor, scale);
    });
    drawTransport();
  });
}

function drawTransport() {
  const { cursor, length } = player;
  at("cursor").max = length;
  at("cursor").value = cursor;
  const place = length ? `Forward ${cursor} of ${length}` : "No forwards yet";
  at("place").textContent = place;
  at("cursor").setAttribute("aria-valuetext", place);
  at("play").textContent = player.moving ? "Pause" : "Play";
  for (const id of ["cursor", "play", "first", "back", "next", "last"]) at(id).disabled = !length;
  at("save").disabled = !length || player.running;
}

async function start() {
  try {
    offerPanes(await models());
  } catch (error) {
    return fail(error);
  }
  try {
    offerExamples(await examples());
  } catch (error) {
    fail(error); // a prompt can be typed all the same
  }
  at("run").disabled = at("load").disabled = false;
  say("Ready.");
}

function offerPanes(found) {
  panes = firstPairs(found).map((pair) => {
    const element = at("pane").content.firstElementChild.cloneNode(true);
    return { element, choice: new Choice(element, found, pair, redraw) };
  });
  panes.forEach(({ element }, i) => {
    element.ariaLabel = ["Left pane", "Right pane"][i];
    element.querySelector(".rows").addEventListener("click", (event) => {
      const { left, width } = event.currentTarget.getBoundingClientRect();
      player.seek(Math.ceil(((event.clientX - left) / width) * player.length));
    });
  });
  at("panes").replaceChildren(...panes.map(({ element }) => element));
  at("order-field").hidden = panes.length < 2;
  redraw();
}

function offerExamples(found) {
  if (at("example").length > 1) return; // asked again, with a key
  const tasks = [...new Set(found.map(({ task }) => task))];
  const groups = tasks.map((task) => {
    const group = make("optgroup", { label: task });
    found.forEach(({ task: own, question }, i) => {
      if (own === task) group.append(new Option(question.replaceAll("\n", " "), i));
    });
    return group;
  });
  const select = at("example");
  select.append(...groups);
  select.addEventListener("change", () => {
    const chosen = found[select.value];
    if (chosen) at("prompt").value = chosen.question;
    at("expected").hidden = !chosen;
    at("expected").textContent = chosen ? `A right answer: ${chosen.answer.replaceAll("\n", " ↵ ")}` : "";
  });
  at("prompt").addEventListener("input", () => {
    select.value = "";
    at("expected").hidden = true;
  });
  if (!at("prompt").value && found.length) {
    select.value = 0;
    select.dispatchEvent(new Event("change"));
  }
}

async function run() {
  if (abort || at("run").disabled) return;
  asked = {
    messages: [{ role: "user", content: at("prompt").value }],
    max_tokens: Number(at("max-tokens").value),
    temperature: Number(at("temperature").value),
  };
  const together = at("order").value === "both" && panes.length > 1;
  at("error").hidden = true;
  runs = panes.map(({ choice }) => newRun(chosen(choice), together));
  abort = new AbortController();
  const { signal } = abort;
  setRunning(true);
  player.begin();
  const decode = (one) =>
    record(one, asked, signal, () => player.reach(one.frames.length));
  const errors = [];
  if (together) {
    errors.push(...(await Promise.all(runs.map(decode))));
  } else {
    for (const one of runs) {
      if (signal.aborted) one.state = "stopped";
      else errors.push(await decode(one));
    }
  }
  abort = null;
  setRunning(false);
  if (errors.some((error) => error?.status === UNAUTHORISED)) askForKey();
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  player.finish(!still && runs.every(({ state }) => state === "done"));
  say(outcome());
}

function chosen(choice) {
  const { id, d2f } = choice.chosenModel;
  const { name, labels } = choice.chosenDecoder;
  return { model: id, decoder: name, options: choice.given(), labels, end_ids: d2f.end_ids };
}

function setRunning(running) {
  at("run").disabled = running;
  at("stop").disabled = !running;
  if (running) say("Running…");
}

/** What came of each pane, in a line that a screen reader reads once. */
function outcome() {
  const parts = runs.map((one) => {
    const { forwards, tokens } = figures(one, one.frames.length);
    const end = one.state === "done" ? "" : `, ${one.state}`;
    return `${one.decoder}: ${tokens} tokens in ${forwards} forwards${end}.`;
  });
  if (runs.length === 2 && runs.every(({ state }) => state === "done")) {
    parts.push(runs[0].text === runs[1].text ? "The same text." : "The texts differ.");
  }
  return parts.join(" ");
}

function say(text) {
  at("status").textContent = text;
}

function fail(error) {
  if (error.status === UNAUTHORISED) askForKey();
  at("error").textContent = error.message;
  at("error").hidden = false;
  say("");
}

function askForKey() {
  at("key-form").hidden = false;
  at("key").focus();
}

function save() {
  const file = new Blob([asFile(asked, runs)], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(file), download: "d2f-trace.json" });
  link.click();
  URL.revokeObjectURL(link.href);
}

async function load(file) {
  try {
    const { request, runs: found } = fromFile(await file.text());
    if (found.length > panes.length) throw new Error("The trace has more runs than there are panes.");
    asked = request;
    runs = found;
    at("prompt").value = request.messages[0].content;
    at("prompt").dispatchEvent(new Event("input"));
    at("error").hidden = true;
    player.show(Math.max(...runs.map((one) => one.frames.length)));
    say(`Loaded ${file.name}. ${outcome()}`);
  } catch (error) {
    fail(error);
  }
}

const MOVES = {
  " ": () => player.toggle(),
  ArrowLeft: () => player.seek(player.cursor - 1),
  ArrowRight: () => player.seek(player.cursor + 1),
  Home: () => player.seek(0),
  End: () => player.seek(player.length),
};

/** Keys that an element has a use of its own for are left to it. */
function pressed(event) {
  if (event.key === "Escape") return abort?.abort();
  if (event.key === "Enter" && event.ctrlKey) return at("ask").requestSubmit();
  const own =
    event.key === " " ? "input:not([type=range]), textarea, select, button, summary" : "input, textarea, select";
  if (event.target.closest(own) || event.altKey || event.ctrlKey || event.metaKey) return;
  if (!(event.key in MOVES) || !player.length) return;
  event.preventDefault();
  MOVES[event.key]();
}

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(at("key").value);
  at("key").value = "";
  at("key-form").hidden = true;
  at("error").hidden = true;
  at("prompt").focus();
  start();
});
at("stop").addEventListener("click", () => abort?.abort());
at("play").addEventListener("click", () => player.toggle());
at("first").addEventListener("click", MOVES.Home);
at("back").addEventListener("click", MOVES.ArrowLeft);
at("next").addEventListener("click", MOVES.ArrowRight);
at("last").addEventListener("click", MOVES.End);
at("cursor").addEventListener("input", () => player.seek(Number(at("cursor").value)));
at("speed").addEventListener("change", () => (player.speed = Number(at("speed").value)));
at("save").addEventListener("click", save);
at("load").addEventListener("click", () => at("file").click());
at("file").addEventListener("change", () => {
  const [file] = at("file").files;
  if (file) load(file);
  at("file").value = "";
});
document.addEventListener("keydown", pressed);
start();
