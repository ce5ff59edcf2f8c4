// Which forward the page shows: it follows a run, plays one back, or stands still.

export class Player {
  /** changed: called after each change of what is to be shown. */
  constructor(changed) {
    this.changed = changed;
    this.cursor = 0; // forwards shown, 0: none
    this.length = 0;
    this.speed = 4; // forwards a second
    this.mode = "still"; // or "following", "playing"
    this.running = false;
    this.timer = undefined;
  }

  get moving() {
    return this.mode !== "still";
  }

  /** A run begins: show its forwards as they come. */
  begin() {
    this.running = true;
    this.length = this.cursor = 0;
    this.set("following");
  }

  /** One of the panes has that many forwards. */
  reach(length) {
    this.length = Math.max(this.length, length);
    if (this.mode === "following") this.cursor = this.length;
    this.changed();
  }

  /** The run is over. replay: play it from the start, if nobody took over meanwhile. */
  finish(replay) {
    this.running = false;
    if (this.mode !== "following") return this.changed();
    if (replay) this.cursor = 0;
    this.set(replay && this.length ? "playing" : "still");
  }

  /** A trace that is all there. */
  show(length) {
    this.running = false;
    this.length = length;
    this.cursor = 0;
    this.set("still");
  }

  toggle() {
    if (this.moving) return this.set("still");
    if (this.cursor >= this.length && !this.running) this.cursor = 0;
    this.set("playing");
  }

  seek(cursor) {
    this.cursor = Math.min(Math.max(cursor, 0), this.length);
    this.set("still");
  }

  set(mode) {
    this.mode = mode;
    clearTimeout(this.timer);
    if (mode === "playing") this.timer = setTimeout(() => this.advance(), 1000 / this.speed);
    this.changed();
  }

  advance() {
    this.cursor = Math.min(this.cursor + 1, this.length);
    const more = this.cursor < this.length;
    this.set(more ? "playing" : this.running ? "following" : "still");
  }
}
