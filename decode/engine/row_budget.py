"""How wide lossless sessions speculate: before each forward its rows are handed out where they are
expected to bring the most tokens a second.

Two things are learned (`decode.engine.learned`): what a forward costs by its rows, those that are
read and those that are not, and its requests; and what a width brings, tokens and rows a forward,
the mean over all requests of the same rules; each request has a factor of its own from what it
gained so far. With n requests that speculate, at widths w_1 .. w_n, and what the others feed and
decode in any case,

    rate = (other tokens + sum of tokens(w_i)) / seconds(other rows + sum of rows(w_i), requests)

is made as large as it can be: from no speculation on, always the requests whose next width brings
most tokens a row are widened, those that expect the same together; of all these states and those in
which all have one width the best is taken. One request alone gets wide where rows are nearly free;
at high load each row costs what it costs, speculation brings less than a token a row, and all fall
back to one token a forward.

Expected, say, of widths 1 and 4: 1 and 2.5 tokens; a forward of R rows takes 10 + R / 2 ms::

    in flight    all at 1                 all at 4
    1            1 / 10.5 = 0.095         2.5 / 12 = 0.21        tokens a ms: speculate
    16           16 / 18 = 0.89           40 / 42 = 0.95
    64           64 / 42 = 1.52           160 / 138 = 1.16       one row a token

Widths stay as they are while others are not expected to be clearly faster. What a width brings is
not the same all along a response (the beginning is often guessed best), and a change has its own
price: a narrow session that was wide lives on what it drafted, a wide one that was narrow has
little to live on. So a width is judged by whole responses that had no other, or by long stretches.
What is never tried stays unknown: now and then a request is held at a width that was seen little,
the best or one beside it.

The tokens of a session do not depend on its width, so that a wrong estimate costs time and nothing
else; `forwards` and `calls` of a result do depend on it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from d2f.model import DiffusionModel
from decode.decoders.adaptive import Adaptive
from decode.engine.cost_curve import Numbers
from decode.engine.learned import Yields, learned_of
from decode.engine.request import Request
from decode.step import Ints, Step

EVERY = 16  # forwards from one choice to the next, where about as many requests run
SELDOM = 64  # at most, where it goes on as it was: twice as many each time
ALIKE = 8  # about as many: by an eighth more or less
OWN = 64.0  # tokens that the expectation counts for beside what a request gained itself
BETTER = 1.02  # times the rate that other widths must promise before they are taken
STRETCH = 64  # forwards at one width that say what it brings, where a response has so many


class Gain:
    """What one session gained, and what was expected of its widths, in tokens above those without
    speculation."""

    def __init__(self, yields: Yields):
        self.yields = yields
        self.gained = self.expected = 0.0
        self.width = 0  # of the forward before; 0 before the first
        self.trial = 0  # forwards that it is still held at its width
        self.since = STRETCH  # forwards since the last occasion for that
        self._changed = False
        self._begin()

    @property
    def factor(self) -> float:
        """How much more or less than others it gains."""
        return (self.gained + OWN) / (self.expected + OWN)

    def _begin(self) -> None:
        """Count from here on: the width changed, or was judged."""
        self._forwards = self._tokens = self._rows = self._reads = 0

    def note(self, width: int, tokens: int, rows: int, reads: int) -> None:
        """After a forward of that width."""
        if width != (self.width or width):
            self._changed = True
            self._begin()
        self.width, self.trial, self.since = width, max(0, self.trial - 1), self.since + 1
        self._forwards, self._tokens = self._forwards + 1, self._tokens + tokens
        self._rows, self._reads = self._rows + rows, self._reads + reads
        if self._forwards == STRETCH:
            self._judge()

    def end(self) -> None:
        """After its last forward."""
        if self._forwards and not self._changed:
            self._judge()

    def _judge(self) -> None:
        """Count the forwards since the last time."""
        forwards, tokens = self._forwards, self._tokens
        self.yields.note(self.width, forwards, tokens, self._rows, self._reads)
        base = self.yields.tokens[0] or 1.0
        at = self.yields.at[self.width]
        self.gained += max(tokens - base * forwards, 0.0)
        self.expected += max(float(self.yields.tokens[at]) - base, 0.0) * forwards
        self._begin()


class RowBudget:
    """The widths of one engine's requests."""

    def __init__(self, model: DiffusionModel):
        self.learned = learned_of(model)
        self._gains: dict[Adaptive, Gain] = {}
        self._usual: dict[Hashable, int] = {}  # index of a width that was chosen last
        self._count = 0  # requests at the last choice
        self._age = 0  # in forwards
        self._lasts = EVERY

    def assign(self, running: Sequence[Request]) -> None:
        """Choose the widths of the steps that are not made yet, mostly as they were."""
        # Where but a few came or went, what was chosen is about right until it is time anyway.
        alike = abs(self._count - len(running)) * ALIKE <= self._count
        stays = alike and self._age + 1 < self._lasts
        if stays and len(self._gains) == len(running):  # nobody is new
            self._age += 1
            return
        sessions = [session for r in running if (session := _choosing(r)) is not None]
        if not sessions:
            return
        new = [session for session in sessions if session not in self._gains]
        for session in new:
            self._gains[session] = Gain(self.learned.yields(session))
        self._age += 1
        if stays and all(_kind(session) in self._usual for session in new):
            # One that took another's place is given what was chosen for its like.
            self._set([(session, self._usual[_kind(session)]) for session in new])
            return
        self._age, self._count = 0, len(running)
        others = [request for request in running if request.adaptive is None]
        steps = [r.feed.step for r in others if r.feed and not r.feed.first]
        rows = np.array([sum(len(s.tokens) for s in steps), sum(len(s.read) for s in steps)])
        chosen = list(zip(sessions, self._choose(sessions, rows, len(others)), strict=True))
        usual = self._usual | {_kind(session): at for session, at in chosen}
        self._lasts = min(2 * self._lasts, SELDOM) if usual == self._usual else EVERY
        self._usual = usual
        self._set(chosen)

    def _set(self, chosen: Iterable[tuple[Adaptive, int]]) -> None:
        """Give sessions the widths of these indices, or one beside it that is to be tried."""
        for session, at in chosen:
            gain = self._gains[session]
            if gain.trial:
                continue
            if gain.since >= STRETCH:
                gain.since = 0
                if (other := gain.yields.trial(at)) is not None:
                    gain.trial, at = STRETCH, other
            session.width = session.widths[at]

    def _choose(self, sessions: Sequence[Adaptive], rows: Numbers, others: int) -> list[int]:
        """Of each session the index of its width. rows: what `others` requests feed and read."""
        hulls: dict[int, Hull] = {}
        groups: dict[tuple[int, float], list[int]] = {}
        found, now = [], []
        for i, session in enumerate(sessions):
            gain = self._gains[session]
            hull = hulls.get(id(gain.yields))
            if hull is None:
                hull = hulls[id(gain.yields)] = Hull(*gain.yields.expected())
            groups.setdefault((id(gain.yields), gain.factor), []).append(i)
            found.append((hull, gain.factor))
            now.append(session.widths.index(gain.width) if gain.width else None)
        members = list(groups.values())
        alike = [(*found[group[0]], len(group)) for group in members]
        owner = np.repeat(np.arange(len(alike)), [len(hull.at) - 1 for hull, _, _ in alike])
        more_tokens = np.concatenate([hull.more_tokens * factor * n for hull, factor, n in alike])
        more_rows = np.hstack([hull.more_rows * n for hull, _, n in alike])
        # Within a hull the tokens a row fall from step to step, so a group's steps stay in order.
        order = np.argsort(-more_tokens / more_rows[0], kind="stable")
        base_rows = rows + sum(hull.rows for hull, _ in found)
        base_tokens = others * self.learned.others + sum(hull.tokens for hull, _ in found)
        same_tokens, same_rows = _with_one_width(found)
        all_tokens = base_tokens + np.hstack([0.0, np.cumsum(more_tokens[order]), same_tokens])
        widened = np.cumsum(more_rows[:, order], axis=1)
        all_rows = base_rows[:, None] + np.hstack([np.zeros((2, 1)), widened, same_rows])
        requests = others + len(found)
        rates = all_tokens / self.learned.curve.seconds(all_rows, requests)
        best = int(np.argmax(rates))
        if best <= len(order):
            taken = np.bincount(owner[order[:best]], minlength=len(alike)).tolist()
            ats = [int(hull.at[n]) for (hull, _, _), n in zip(alike, taken, strict=True)]
        else:
            ats = [min(best - len(order) - 1, hull.last) for hull, _, _ in alike]
        chosen = [0] * len(sessions)
        for group, at in zip(members, ats, strict=True):
            for i in group:
                chosen[i] = at
        stay = [at if was is None else was for at, was in zip(chosen, now, strict=True)]
        if stay == chosen:
            return chosen
        gains = [hull.beyond(at) for (hull, _), at in zip(found, stay, strict=True)]
        tokens = base_tokens + sum(m * f for (m, _), (_, f) in zip(gains, found, strict=True))
        now_rows = base_rows + sum(n for _, n in gains)
        seconds = self.learned.curve.seconds(now_rows[:, None], requests)
        rate = tokens / float(seconds[0])
        return chosen if rates[best] > BETTER * rate else stay

    def note_request(self, request: Request, step: Step, *, first: bool) -> None:
        """What the forward of a step, or of its last piece, brought a request. first: it had the
        prompt."""
        session, tokens = request.adaptive, len(request.session.revealed)
        if session is None or session not in self._gains:
            self.learned.others += (tokens - self.learned.others) / 64
            return
        gain = self._gains[session]
        fed, reads = len(step.tokens), len(step.read)
        if first:
            behind = int((step.slots >= session.prompt_length).sum())
            gain.yields.begin(session.width, fed - behind, behind, reads, tokens)
        else:
            gain.note(session.width, tokens, fed, reads)
        if request.done:
            gain.end()
            gain.yields.end(len(session.settled))

    def forget(self, request: Request) -> None:
        """The request has left."""
        if request.adaptive is not None:
            self._gains.pop(request.adaptive, None)


class Hull:
    """The widths that may be the best at some load: the corners of the upper hull of tokens over
    rows that are fed. at: their indices. rows, fed and read, and tokens: of the first. more_rows,
    more_tokens: from each to the next."""

    def __init__(self, tokens: Numbers, rows: Numbers):
        kept, fed = [0], rows[0]
        for i in range(1, len(fed)):
            if fed[i] <= fed[kept[-1]] or tokens[i] <= tokens[kept[-1]]:
                continue
            while len(kept) > 1 and _slope(tokens, fed, kept[-1], i) >= _slope(
                tokens, fed, kept[-2], kept[-1]
            ):
                kept.pop()
            kept.append(i)
        self.at = np.array(kept)
        self._all = tokens, rows
        self.tokens, self.rows = float(tokens[0]), rows[:, 0]
        self.more_tokens, self.more_rows = np.diff(tokens[kept]), np.diff(rows[:, kept])

    @property
    def last(self) -> int:
        """Index of the widest, also where it is no corner."""
        return len(self._all[0]) - 1

    def beyond(self, at: int) -> tuple[float, Numbers]:
        """Tokens and rows of the width `at` above those of the first."""
        tokens, rows = self._all
        return float(tokens[at] - tokens[0]), rows[:, at] - rows[:, 0]

    def all_beyond(self, at: Ints) -> tuple[Numbers, Numbers]:
        """The same of many: ``[N]`` and ``[2, N]``."""
        tokens, rows = self._all
        return tokens[at] - tokens[0], rows[:, at] - rows[:, :1]


def _with_one_width(found: Sequence[tuple[Hull, float]]) -> tuple[Numbers, Numbers]:
    """Tokens and rows above no speculation where all have the width of one index, or their last, by
    that index. found: of each session what is expected, and its factor."""
    factors: dict[Hull, list[float]] = {}
    for hull, factor in found:
        factors.setdefault(hull, []).append(factor)
    index = np.arange(1 + max(hull.last for hull in factors))
    tokens, rows = np.zeros(len(index)), np.zeros((2, len(index)))
    for hull, own in factors.items():
        more_tokens, more_rows = hull.all_beyond(np.minimum(index, hull.last))
        tokens, rows = tokens + sum(own) * more_tokens, rows + len(own) * more_rows
    return tokens, rows


def _slope(tokens: Numbers, rows: Numbers, i: int, j: int) -> float:
    return float((tokens[j] - tokens[i]) / (rows[j] - rows[i]))


def _kind(session: Adaptive) -> Hashable:
    """Sessions of the same kind are expected to gain the same from a width."""
    return session.learns_with, session.widths


def _choosing(request: Request) -> Adaptive | None:
    """The session of a request whose next step may still be made in any width."""
    feed = request.feed
    return None if feed is None or feed.is_made else request.adaptive
