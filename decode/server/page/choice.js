// Which model, which decoder and which of its options a pane runs.

import { make } from "./elements.js";

// Fields of the request that have a place of their own on the page, for both panes.
const SHARED = ["max_new_tokens", "temperature"];

/** All pairs of /v1/models: [{model, decoder}], the model's own default decoder first. */
export function pairs(models) {
  return models.flatMap((model) => {
    const first = model.d2f.default_decoder;
    const names = model.d2f.decoders.map((decoder) => decoder.name);
    names.sort((a, b) => (b === first) - (a === first));
    return names.map((decoder) => ({ model: model.id, decoder }));
  });
}

/** The two pairs to begin with: D2F and autoregressive where they are there, else two others. */
export function firstPairs(models) {
  const all = pairs(models);
  const left = all.find((pair) => pair.decoder === "d2f") ?? all[0];
  const others = all.filter((pair) => pair !== left);
  const right =
    others.find((pair) => pair.decoder === "autoregressive") ??
    others.find((pair) => pair.model !== left?.model) ??
    others[0];
  return [left, right].filter(Boolean);
}

/** The part of a pane where it is chosen what it runs. */
export class Choice {
  /** changed: called when another pair is chosen. */
  constructor(element, models, pair, changed) {
    this.models = models;
    this.changed = changed;
    this.model = element.querySelector(".model");
    this.decoder = element.querySelector(".decoder");
    this.about = element.querySelector(".about");
    this.options = element.querySelector(".options");
    this.fields = element.querySelector(".option-fields");
    this.model.replaceChildren(...models.map(({ id }) => new Option(id)));
    this.model.value = pair.model;
    this.model.addEventListener("change", () => this.offerDecoders());
    this.decoder.addEventListener("change", () => this.offerOptions());
    this.fields.addEventListener("input", () => this.countChanged());
    this.offerDecoders(pair.decoder);
  }

  get chosenModel() {
    return this.models.find(({ id }) => id === this.model.value);
  }

  get chosenDecoder() {
    return this.chosenModel.d2f.decoders.find(({ name }) => name === this.decoder.value);
  }

  offerDecoders(wanted) {
    const { decoders, default_decoder: usual } = this.chosenModel.d2f;
    this.decoder.replaceChildren(...decoders.map(({ name }) => new Option(name)));
    this.decoder.value = wanted ?? usual;
    this.offerOptions();
  }

  offerOptions() {
    this.about.textContent = this.chosenDecoder.summary;
    const offered = this.chosenDecoder.options.filter(({ name }) => !SHARED.includes(name));
    this.fields.replaceChildren(...offered.map(field));
    this.countChanged();
    this.changed();
  }

  countChanged() {
    const count = Object.keys(this.given()).length;
    this.options.querySelector("summary").textContent = count
      ? `Options of ${this.decoder.value} (${count} changed)`
      : `Options of ${this.decoder.value}`;
  }

  /** The options that are not left at their defaults, by name. */
  given() {
    const found = {};
    for (const option of this.chosenDecoder.options) {
      const input = this.fields.querySelector(`[name="${CSS.escape(option.name)}"]`);
      const value = input && input.value.trim();
      if (value) found[option.name] = parsed(value, option.kind);
    }
    return found;
  }
}

/** A field that is empty for the default. */
function field({ name, kind, shown, help }) {
  const usual = `default: ${shown}`;
  const words = kind === "bool" ? ["true", "false"] : Array.isArray(kind) ? kind : null;
  const input = words
    ? make("select", { name }, new Option(usual, ""), ...words.map((word) => new Option(word)))
    : make("input", { name, inputMode: "decimal", placeholder: usual, autocomplete: "off" });
  return make("label", {}, make("b", {}, name), input, make("small", {}, help));
}

/** The value that was typed; what is no number is left to the server to refuse in its words. */
function parsed(value, kind) {
  if (kind === "bool") return value === "true";
  if (Array.isArray(kind) || !Number.isFinite(Number(value))) return value;
  return Number(value);
}
