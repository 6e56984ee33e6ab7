# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""The page that shows a report. Pure.

It is one file: no script, nothing from elsewhere, and readable without colours. All that a host says (names,
versions, messages, journals) is escaped where it goes into the page, once, by ``_tag``.
"""

from __future__ import annotations

import datetime
import html
import re
import statistics
import typing as t
import unicodedata

Row = t.Mapping[str, t.Any]


class Look(t.NamedTuple):
    """How a phase is drawn and called. Each has a letter and a pattern, so that colour only helps."""

    letter: str
    word: str
    says: str
    fill: str
    drawn: str


DOT = '<circle cx="3" cy="3" r="1.1"/>'
LOOKS = {
    "withdraw": Look("W", "withdrawn", "until the router has noticed", "#fff", DOT),
    "drain": Look("D", "drain", "requests in flight finish", "#e3eefb", '<path d="M-1 7 7-1"/>'),
    "sleep": Look("Z", "sleep", "put to sleep, memory proved free", "#e9e4f5", '<path d="M0 3h6M3 0v6"/>'),
    "stop": Look("S", "stop", "until its processes have ended", "#9aa0a6", ""),
    "prepare": Look("C", "checks", "before the process starts", "#fff", '<path d="M0 3h6"/>'),
    "start": Look("T", "start", "of which no more is known", "#f3f0e6", '<path d="M0 1h6M0 4h6"/>'),
    "boot": Look("B", "boot", "until it answers", "#fdf1d8", '<path d="M-1-1 7 7"/>'),
    "import": Look("I", "import", "its processes begin, and import vLLM", "#fdf1d8", '<path d="M-1-1 7 7M0 3h6"/>'),
    "load": Look("L", "load", "model and weights", "#fdf1d8", '<path d="M0 0l3 3 3-3"/>'),
    "compile": Look("M", "compile", "by torch.compile, or from its cache", "#fdf1d8", '<path d="M0 1h3M3 4h3"/>'),
    "profile": Look("G", "profile", "memory measured, graphs captured", "#fdf1d8", '<path d="M1 0v3M4 3v3"/>'),
    "serve": Look("V", "serve", "its API server begins, until it answers", "#fdf1d8", DOT),
    "wake": Look("K", "wake", "memory and weights come back", "#e4f3ea", '<path d="M0 0l3 6 3-6"/>'),
    "warm": Look("U", "warm-up", "and how fast it is", "#fbe3dc", '<path d="M-1-1 7 7M-1 7 7-1"/>'),
    "prove": Look("P", "proof", "by its golden or a completion", "#e4f3ea", '<path d="M3 0v6"/>'),
    "admit": Look("A", "admitted", "until the router may send again", "#fff", ""),
}
UNNAMED = Look("?", "", "", "#fff", '<path d="M2 2h2v2h-2z"/>')
GAP = "between"

# Of each kind of report the title, the playbook, the variable that names a run to go on with, and what it does then.
DONE_STAYS = "It leaves alone what is done already:"
TITLES = {
    "roll": ("Rolling restart", "rolling_restart", "vllm_roll_run", ""),
    "upgrade": ("Rolling upgrade", "rolling_upgrade", "vllm_upgrade_run", ""),
    "switch": ("Switch", "switch", "", DONE_STAYS),
    "schedule": ("Calendar", "schedule", "", DONE_STAYS),
    "sleep": ("Sleep", "sleep", "", DONE_STAYS),
    "wake": ("Wake", "wake", "", DONE_STAYS),
    "measure": (
        "Starts and wakes, measured",
        "measure",
        "",
        "It brings back what is out, and measures anew:",
    ),
}
# The ways into service that playbook measure knows, and what each of them is.
MEASURED = {
    "cold": "cold start",
    "warm": "warm start",
    "preload": "preload start",
    "sleep1": "wake from level 1",
    "sleep2": "wake from level 2",
}
MEASURED_SAYS = {
    "cold": "weights read from the disk",
    "preload": "weights from its preload daemon",
    "sleep1": "weights copied back from host memory",
    "sleep2": "weights loaded anew",
}
GOOD = {
    "restarted": "✔ restarted",
    "upgraded": "✔ upgraded",
    "changed": "✔ changed",
    "measured": "✔ measured",
    "done": "✔ done before",
    "unchanged": "= unchanged",
}
BAD = {"failed": "✖ failed", "rolled_back": "↩ went back", "lost": "✖ lost"}
UNTOUCHED = {
    "waiting": "Not touched, still waiting",
    "done": "Done before, in this same run",
    "unchanged": "As they should be already",
    "skipped": "Not measured",
}
WORDS = {**GOOD, **BAD, "waiting": "… waiting", "skipped": "- not measured"}

STYLE = """
:root{color-scheme:light;--ink:#16181b;--soft:#5b6167;--line:#c9ced3}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.25rem 1rem 3rem;max-width:78rem;background:#fff;color:var(--ink);
 font:15px/1.45 system-ui,"Segoe UI",Roboto,"DejaVu Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.55rem;line-height:1.2;margin:0}
h2{font-size:1.1rem;margin:2.2rem 0 .5rem;padding-bottom:.2rem;border-bottom:2px solid var(--ink)}
h3{font-size:1rem;margin:0}
p{margin:.4rem 0}
code,pre,.n{font-family:ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}
.n{font-variant-numeric:tabular-nums}
.soft{color:var(--soft)}
.verdict{font-size:1.15rem;font-weight:650;margin:.9rem 0 .2rem;padding:.55rem .8rem;border:2px solid var(--ink);
 border-radius:6px}
.verdict.bad{border-width:2px 2px 2px 10px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.1rem 1.2rem;margin:1rem 0 0}
.figures div{border-top:1px solid var(--line);padding:.35rem 0}
dt{color:var(--soft);font-size:.83rem}
dd{margin:0;font-weight:600}
.card{border:1px solid var(--ink);border-left-width:10px;border-radius:6px;padding:.6rem .8rem;margin:.7rem 0}
.card h3 .badge{margin-left:.4rem}
pre{margin:.4rem 0;white-space:pre-wrap}
.cmd{border:1px solid var(--line);border-radius:4px;padding:.5rem .6rem;background:#f6f7f8}
summary{cursor:pointer;color:var(--soft)}
.badge{display:inline-block;white-space:nowrap;border:1px solid var(--line);border-radius:4px;padding:0 .4rem;
 font-size:.83rem;font-weight:600}
.badge.bad{border:2px solid var(--ink)}
.badge.waiting{border-style:dashed}
.legend{display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;list-style:none;margin:.5rem 0 1rem;padding:0;font-size:.86rem}
.legend svg{width:30px;height:18px;vertical-align:-4px;margin-right:.35rem}
.lanes{list-style:none;margin:0;padding:0}
.lane,.axis{display:grid;grid-template-columns:minmax(0,15rem) minmax(0,8rem) minmax(0,1fr) 6rem;gap:.1rem .9rem}
.lane{border-top:1px solid var(--line);padding:.35rem 0 .3rem;break-inside:avoid}
.axis{position:sticky;top:0;background:#fff;color:var(--soft);font-size:.8rem;align-items:end;padding:.3rem 0 .15rem}
.lane .who{grid-row:span 2}
.lane .who b{display:block;line-height:1.3;font-size:.95em}
.lane .took{text-align:right;font-weight:600}
.lane .parts{grid-column:2/-1;font-size:.83rem;color:var(--soft)}
.when{position:relative;height:22px}
.when::before{content:"";position:absolute;left:0;right:0;top:10px;border-top:1px solid var(--line)}
.when i{position:absolute;top:4px;height:14px;background:#fff;border:2px solid var(--ink)}
.when i.open{border-style:solid none solid solid}
.ends{display:flex;justify-content:space-between;gap:.3rem;white-space:nowrap}
svg{display:block;overflow:visible}
.bar{width:100%;height:22px}
.bar rect{stroke:var(--ink);stroke-width:1}
.bar .open{fill:#fff;stroke-dasharray:3 3}
.bar line{stroke:var(--line)}
.bar .rest{stroke:var(--ink)}
.bar text,.legend text{font:700 11px ui-monospace,Menlo,"DejaVu Sans Mono",monospace;text-anchor:middle;fill:var(--ink);
 stroke:#fff;stroke-width:4px;paint-order:stroke;stroke-linejoin:round}
.chart{margin:.2rem 0 1rem}
.chart ol{list-style:none;margin:.2rem 0 0;padding:0}
.chart li{display:grid;grid-template-columns:minmax(0,15rem) minmax(0,1fr) minmax(0,15rem);gap:.1rem .9rem;
 border-top:1px solid var(--line);padding:.35rem 0;break-inside:avoid}
.chart span{display:block;font-size:.83rem;color:var(--soft);font-weight:400}
.ticks{width:100%;height:14px}
.ticks text{font-size:12px;fill:var(--soft);text-anchor:middle}
.ticks text:first-child{text-anchor:start}
.legend svg,.legend rect{display:inline-block}
.legend rect{stroke:var(--ink)}
pattern path{stroke:#16181b;stroke-width:1;fill:none}
pattern circle{fill:#16181b}
table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{text-align:left;vertical-align:top;padding:.35rem .8rem .35rem 0;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:500;font-size:.83rem;border-color:var(--ink)}
.names{display:flex;flex-wrap:wrap;gap:.1rem .9rem}
footer{margin-top:2.5rem;color:var(--soft);font-size:.83rem}
@media (max-width:760px){
 body{padding:.9rem .9rem 2rem}
 .lane,.axis{grid-template-columns:minmax(0,1fr) auto}
 .axis .who,.axis .took,.axis .ends{display:none}
 .axis svg{grid-column:1/-1}
 .lane .who{grid-row:auto;order:-3}
 .lane .who b{display:inline;margin-right:.35rem}
 .lane .took{order:-2}
 .lane .bar{grid-column:1/-1;order:-1}
 .lane .when{grid-column:1/-1;height:12px}
 .when::before{top:5px}
 .when i{top:1px;height:9px}
 .lane .parts{grid-column:1/-1}
 .chart li{grid-template-columns:minmax(0,1fr) minmax(0,1fr)}
 .chart .value{text-align:right}
 .chart .bar{grid-column:1/-1;order:3}
 table,tbody,tr,td{display:block}
 thead{display:none}
 tr{border-bottom:1px solid var(--ink);padding:.4rem 0}
 td{border:0;padding:.1rem 0;display:grid;grid-template-columns:8rem minmax(0,1fr);gap:.6rem}
 td::before{content:attr(data-of);color:var(--soft);font-size:.86rem}
}
@media print{body{max-width:none;padding:0;font-size:11px}.axis{position:static}}
"""


class Markup(str):
    """Text that is part of the page as it is. Any other text is escaped."""

    __slots__ = ()


def _text(value: t.Any) -> str:
    """Escaped, and without characters that control a terminal or turn the direction of what follows."""
    clean = "".join(
        one if one in "\n\t" or unicodedata.category(one) not in ("Cc", "Cf", "Cs") else "\N{REPLACEMENT CHARACTER}"
        for one in str(value)
    )
    return html.escape(clean)


def _join(parts: t.Iterable[t.Any]) -> Markup:
    return Markup("".join(part if isinstance(part, Markup) else _text(part) for part in parts))


def _tag(name: str, *children: t.Any, **attributes: t.Any) -> Markup:
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{_join(children)}</{name}>")


class Lane(t.NamedTuple):
    """One time out of rotation of one engine. ``end`` is None while it lasts; all in seconds since the epoch."""

    row: Row
    engine: str
    turn: int
    since: float
    end: float | None
    phases: list[Row]

    def until(self) -> float:
        """The end, or of one that lasts the end of what is known."""
        known = [float(one["at"]) + float(one["seconds"]) for one in self.phases]
        return self.end if self.end is not None else max([self.since, *known])


class Page:
    """A report and what follows from all of it."""

    def __init__(self, report: Row) -> None:
        self.report = report
        kind = str(report.get("schema") or "").rpartition("/")[2]
        unknown = (kind.capitalize() or "Report", kind, "", "")
        self.title, self.playbook, self.variable, self.again = TITLES.get(kind, unknown)
        self.written = _epoch(report.get("written"))
        lost = set(report.get("lost") or ())
        self.rows = [_row(row, lost) for row in [*(report.get("hosts") or ()), *(report.get("others") or ())]]
        self.lanes = sorted(
            (lane for row in self.rows for lane in _lanes(row)), key=lambda lane: (lane.since, lane.row["name"])
        )
        self.begin = min((lane.since for lane in self.lanes), default=None)
        ends = [max(lane.until(), self.written or 0 if lane.end is None else 0) for lane in self.lanes]
        self.end = max(ends, default=None)
        finished = [lane.until() - lane.since for lane in self.lanes]
        self.longest = max(finished, default=0.0) or 1.0

    def count(self, *outcomes: str) -> int:
        return sum(1 for row in self.rows if row["outcome"] in outcomes)

    def of(self, *outcomes: str) -> list[Row]:
        return [row for row in self.rows if row["outcome"] in outcomes]


def _epoch(text: t.Any) -> float | None:
    try:
        found = datetime.datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%SZ")
    except ValueError:
        return None
    return found.replace(tzinfo=datetime.timezone.utc).timestamp()


def _row(row: Row, lost: t.Collection[str]) -> Row:
    """A row of any playbook's report: with its engine, its outcome and its reason."""
    outcome = row.get("outcome") or ("changed" if row.get("changed") else "unchanged")
    if outcome == "waiting" and row["name"] in lost:
        outcome = "lost"
    engine = row.get("engine")
    if engine is None and outcome in (*BAD, "waiting"):  # one row for a host
        engine = ", ".join(row.get("engines") or ())
    elif engine is None:
        turns = [(", ".join(row.get(key) or ()), word) for key, word in (("slept", "asleep"), ("woken", "awake"))]
        engine = ", ".join(f"{names} {word}" for names, word in turns if names)
    reason = row.get("reason") or "; ".join(row.get("held") or ())
    return {**row, "engine": engine, "outcome": outcome, "reason": reason}


def _lanes(row: Row) -> list[Lane]:
    found: list[Lane] = []
    for one in row.get("spans") or ():
        if one.get("since") is not None:
            since = float(one["since"])
            end = None if one.get("seconds") is None else since + float(one["seconds"])
            engine = str(one.get("engine") or row["engine"])
            engine += f", {_way(row)}" if "path" in row else ""
            turn = 1 + sum(lane.engine == engine for lane in found)
            found.append(Lane(row, engine, turn, since, end, list(one.get("phases") or ())))
    return found


def _way(row: Row) -> str:
    return MEASURED.get(str(row["path"]), str(row["path"]))


def _seconds(value: float) -> str:
    if value < 100:
        says = f"{value:.1f} s" if value < 10 else f"{value:.0f} s"
    else:
        minutes, seconds = divmod(round(value), 60)
        says = f"{minutes} min {seconds:02d} s" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"
    return says.replace(" ", "\N{NO-BREAK SPACE}")


def _clock(at: float | None, form: str = "%H:%M:%S") -> str:
    return "?" if at is None else datetime.datetime.fromtimestamp(at, datetime.timezone.utc).strftime(form)


def _share(part: float, whole: float) -> str:
    return f"{max(0.0, min(100.0, 100 * part / whole)):.3f}%"


def _look(phase: str) -> Look:
    return LOOKS.get(phase) or UNNAMED._replace(word=phase)


def _fill(phase: str) -> str:
    return f"url(#p-{phase if phase in LOOKS else 'other'})"


def _patterns() -> Markup:
    """One for each phase: a light ground, and black lines that tell it from the others."""
    drawn = [
        _tag(
            "pattern",
            _tag("rect", width=6, height=6, fill=look.fill),
            Markup(look.drawn),
            id=f"p-{phase}",
            width=6,
            height=6,
            patternUnits="userSpaceOnUse",
        )
        for phase, look in [*LOOKS.items(), ("other", UNNAMED)]
    ]
    return _tag("svg", _tag("defs", *drawn), width=0, height=0, aria_hidden="true", style="position:absolute")


def _ticks(longest: float) -> list[tuple[float, str]]:
    """Where the scale has its marks, and what they say."""
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)
    step = next((one for one in steps if longest / one <= 5.5), longest / 5)
    unit, words = (3600, "h") if step >= 3600 else (60, "min") if step >= 60 else (1, "s")
    marks = [step * number for number in range(int(longest / step) + 1)]
    return [(at, f"{at / unit:.3g} {words}") for at in marks]


def _verdict(page: Page) -> Markup:
    total, left = len(page.rows) - page.count("skipped"), page.count(*BAD, "waiting")
    if left:
        counts = [(page.count(outcome), WORDS[outcome].partition(" ")[2]) for outcome in (*BAD, "waiting")]
        says = ", ".join(f"{number} {word}" for number, word in counts if number)
        says = f"✖ Not complete: {says}; {total - left} of {total} done"
    elif not total:
        says = "Nothing was changed: no engine is in this report"
    elif page.count("unchanged") == total:
        says = f"= Nothing to do: all {total} are as they should be"
    else:
        says = f"✔ Complete: {total} of {total}"
    return _tag("p", says, class_="verdict bad" if left else "verdict")


def _figures(page: Page) -> Markup:
    took = [lane.end - lane.since for lane in page.lanes if lane.end is not None]
    figures: list[tuple[str, t.Any]] = [
        (WORDS[outcome].partition(" ")[2], page.count(outcome)) for outcome in WORDS if page.count(outcome)
    ]
    touched = [row for row in page.rows if row["outcome"] not in UNTOUCHED and "requests_cut" in row]
    known = [row["requests_cut"] for row in touched if row["requests_cut"] is not None]
    unknown = len(touched) - len(known)
    if known or unknown:
        parts = [str(sum(known))] * bool(known) + [f"not known of {unknown} engine(s)"] * bool(unknown)
        figures.append(("requests cut", "; ".join(parts)))
    if took:
        longest = max(page.lanes, key=lambda lane: (lane.end or 0) - lane.since if lane.end is not None else -1)
        figures.append(("longest out of rotation", _join([_seconds(max(took)), " ", _name(longest.row["name"])])))
        figures.append(("out of rotation, median", _seconds(statistics.median(took))))
    if page.begin is not None and page.end is not None:
        figures.append(("first withdrawn", _clock(page.begin, "%Y-%m-%d %H:%M:%S UTC")))
        figures.append(("took", _seconds(page.end - page.begin)))
    if page.written:
        figures.append(("report written", _clock(page.written, "%Y-%m-%d %H:%M:%S UTC")))
    return _tag("dl", *(_tag("div", _tag("dt", name), _tag("dd", value)) for name, value in figures), class_="figures")


def _name(value: t.Any) -> Markup:
    """A name that may be broken after its dots and dashes, rather than anywhere."""
    return Markup(re.sub("([.-])", r"\1<wbr>", _text(value)))


def _badge(outcome: str) -> Markup:
    kind = "bad" if outcome in BAD else "waiting" if outcome == "waiting" else ""
    return _tag("span", WORDS.get(outcome, outcome), class_=f"badge {kind}".strip())


def _failures(page: Page) -> list[Markup]:
    """What went wrong, host by host, and how to go on."""
    cards: dict[tuple[str, str, str], list[Row]] = {}
    for row in page.of(*BAD):
        cards.setdefault((row["name"], row["outcome"], row["reason"]), []).append(row)
    found = []
    for (name, outcome, reason), rows in cards.items():
        head, _newline, rest = reason.strip().partition("\n")
        seen = [pair for row in rows for pair in (row.get("states") or {row["engine"]: row.get("state")}).items()]
        states = "; ".join(f"{engine} {state or 'not seen'}" for engine, state in seen)
        before = f"{'Before that' if outcome == 'lost' else 'Seen last'}: {states}"
        if "path" in rows[0]:
            before = "; ".join(f"{row['engine']}, {_way(row)}" for row in rows)
        found.append(
            _tag(
                "article",
                _tag("h3", _name(name), " ", _badge(outcome)),
                _tag("p", before, class_="soft"),
                _tag("pre", head or "It did not answer any more."),
                _tag("details", _tag("summary", "All that was seen"), _tag("pre", rest)) if rest else "",
                class_="card",
            )
        )
    return [_tag("h2", "What failed"), *found] if found else []


def _resume(page: Page) -> list[Markup]:
    if not page.of(*BAD, "waiting") or not (page.variable or page.again):
        return []
    command = f"ansible-playbook -i INVENTORY baremetal.vllm.{page.playbook}"
    command += f" -e {page.variable}={page.report['run']}" if page.variable else ""
    journals = [
        f"on {row['name']}: journalctl -u vllm-engine@{engine}"
        for row in page.of("failed", "rolled_back")
        for engine in row.get("engines") or [row["engine"]]
    ]
    lost = sorted({row["name"] for row in page.of("lost")})
    found = [_tag("h2", "How to go on")]
    if journals:
        found += [
            _tag("p", "Correct the cause. What the engines themselves have said:"),
            _tag("pre", "\n".join(journals[:5]), class_="cmd"),
        ]
    if lost:
        found.append(_tag("p", f"Bring back {', '.join(lost)}, or leave it out with --limit."))
    again = page.again or "It begins with the hosts that do not serve, and leaves alone those that are done:"
    return [
        *found,
        _tag("p", f"Run the same command again, with its own options. {again}"),
        _tag("pre", command, class_="cmd"),
    ]


def _sums(lane: Lane) -> list[tuple[str, float]]:
    """Seconds by phase, in the order of their first, and what is left between them."""
    spent: dict[str, float] = {}
    for one in lane.phases:
        spent[one["phase"]] = spent.get(one["phase"], 0.0) + float(one["seconds"])
    between = lane.until() - lane.since - sum(spent.values())
    return [*spent.items(), *([(GAP, between)] if spent and between >= 0.05 else [])]


def _blocks(phases: t.Iterable[tuple[str, float, float]], whole: float) -> tuple[list[Markup], list[Markup]]:
    """The blocks of phases, each from its beginning and as wide as it was long; and the letters upon them."""
    blocks, letters = [], []
    for phase, begin, width in phases:
        look = _look(phase)
        blocks.append(
            _tag(
                "rect",
                _tag("title", f"{look.word} {_seconds(width)}"),
                x=_share(begin, whole),
                width=_share(width, whole),
                y=2,
                height=18,
                fill=_fill(phase),
            )
        )
        if width / whole >= 0.03:
            letters.append(_tag("text", look.letter, x=_share(begin + width / 2, whole), y=15))
    return blocks, letters


def _bar(page: Page, lane: Lane) -> Markup:
    parts: list[t.Any] = []
    for tick, _says in _ticks(page.longest):
        at = _share(tick, page.longest)
        parts.append(_tag("line", x1=at, x2=at, y1=0, y2=22))
    end = 100.0 if lane.end is None else 100 * (lane.until() - lane.since) / page.longest
    parts.append(_tag("line", x1="0%", x2=f"{end:.3f}%", y1=11, y2=11, class_="rest"))
    drawn = [(one["phase"], float(one["at"]) - lane.since, float(one["seconds"])) for one in lane.phases]
    known = max((begin + width for _phase, begin, width in drawn), default=0.0)
    blocks, letters = _blocks(drawn, page.longest)
    parts += blocks
    if lane.end is None and known < page.longest:
        left = page.longest - known
        parts.append(
            _tag("rect", x=_share(known, page.longest), width=_share(left, page.longest), y=2, height=18, class_="open")
        )
        letters.append(_tag("text", "still out", x=_share(known + left / 2, page.longest), y=15))
    says = ", ".join(f"{_look(phase).word} {_seconds(seconds)}" for phase, seconds in _sums(lane))
    return _tag("svg", *parts, *letters, class_="bar", role="img", aria_label=says)


def _when(page: Page, lane: Lane) -> Markup:
    begin, end = t.cast(float, page.begin), t.cast(float, page.end)
    whole = max(end - begin, 0.001)
    until = end if lane.end is None else lane.until()
    left, width = _share(lane.since - begin, whole), _share(until - lane.since, whole)
    style = f"left:min({left},100% - 3px);width:max(3px,{width})"
    return _tag("div", _tag("i", style=style, class_="open" if lane.end is None else None), class_="when")


def _lane(page: Page, lane: Lane) -> Markup:
    row = lane.row
    took = "still out" if lane.end is None else _seconds(lane.until() - lane.since)
    parts = [f"{_look(phase).word} {_seconds(seconds)}" for phase, seconds in _sums(lane)]
    words = f"{_clock(lane.since)} UTC: " + (" · ".join(parts) or "no finished step is on record")
    again = " (again)" if lane.turn > 1 else ""
    return _tag(
        "li",
        _tag(
            "div",
            _tag("b", _name(row["name"])),
            f"{lane.engine}{again} ",
            _badge(row["outcome"]) if row["outcome"] in BAD else "",
            class_="who",
        ),
        _when(page, lane),
        _bar(page, lane),
        _tag("div", took, class_="took n"),
        _tag("div", words, class_="parts"),
        class_="lane",
    )


def _legend(there: set[str]) -> Markup:
    entries = []
    for phase in [*(one for one in LOOKS if one in there), *sorted(there - set(LOOKS))]:
        look = _look(phase)
        sample = _tag(
            "svg",
            _tag("rect", x=1, y=1, width=28, height=16, fill=_fill(phase)),
            _tag("text", look.letter, x=15, y=13),
            aria_hidden="true",
        )
        says = _tag("span", f" {look.says}", class_="soft") if look.says else ""
        entries.append(_tag("li", sample, _tag("b", look.word), says))
    return _tag("ul", *entries, class_="legend")


def _charts(page: Page) -> list[Markup]:
    """The bars of what was measured: how long until proved, and how much GPU memory."""
    rows = list(page.report.get("summary") or ())
    if not rows:
        return []
    engines = list(dict.fromkeys((row["name"], row["engine"]) for row in rows))
    longest = max(float(row["ready_s"]["max"]) for row in rows) or 1.0
    largest = max((row["gpu_peak_mib"] or 0 for row in rows), default=0)
    found = [
        _tag("h2", "Until an engine is proved"),
        _tag(
            "p",
            "From the beginning of the start or the wake until its golden, or a completion, has proved the engine. Of "
            "several rounds the one in the middle is drawn, and the median is given with the least and the most.",
            class_="soft",
        ),
        _legend({str(one["phase"]) for row in rows for one in row["phases"]}),
    ]
    for host, engine in engines:
        bars = [_time_bar(row, longest) for row in rows if (row["name"], row["engine"]) == (host, engine)]
        found.append(_tag("section", _tag("h3", _name(host), f" {engine}"), _tag("ol", *bars), class_="chart"))
    found.append(_tag("h2", "GPU memory"))
    if not largest:
        return [*found, _tag("p", "It was not seen: NVML gave no number.", class_="soft")]
    found.append(
        _tag(
            "p",
            "The most that the processes of the engine held on all of its GPUs in any sample until it served; before a "
            "wake, what they held asleep.",
            class_="soft",
        )
    )
    for host, engine in engines:
        bars = [_memory_bar(row, largest) for row in rows if (row["name"], row["engine"]) == (host, engine)]
        found.append(_tag("section", _tag("h3", _name(host), f" {engine}"), _tag("ol", *bars), class_="chart"))
    return found


def _chart_row(row: Row, parts: t.Iterable[Markup], value: str, more: t.Iterable[str]) -> Markup:
    says = MEASURED_SAYS.get(str(row["path"]), "")
    if row["path"] == "warm":
        share = row.get("cached_share")
        says = f"weights in the page cache: {'not seen' if share is None else f'{100 * share:.0f} %'}"
    return _tag(
        "li",
        _tag("div", _tag("b", _way(row)), _tag("span", says), class_="what"),
        _tag("svg", *parts, class_="bar", role="img", aria_label=f"{_way(row)}: {value}"),
        _tag("div", _tag("b", value), *(_tag("span", one) for one in more), class_="value n"),
    )


def _time_bar(row: Row, longest: float) -> Markup:
    ready, token = row["ready_s"], row["first_token_s"]
    begin, drawn = 0.0, []
    for one in row["phases"]:
        drawn.append((str(one["phase"]), begin, float(one["seconds"])))
        begin += float(one["seconds"])
    blocks, letters = _blocks(drawn, longest)
    more = [f"{_seconds(ready['min'])} to {_seconds(ready['max'])}, {row['rounds']} rounds"] * (row["rounds"] > 1)
    more += [f"first token {_milliseconds(token['median'])}"] if token else []
    return _chart_row(row, [*blocks, *letters], _seconds(ready["median"]), more)


def _memory_bar(row: Row, largest: int) -> Markup:
    peak, asleep = row["gpu_peak_mib"], row["gpu_asleep_mib"]
    parts = []
    for mib, fill in ((peak, "#c9ced3"), (asleep, _fill("sleep"))):
        if mib is not None:
            parts.append(_tag("rect", x=0, width=_share(mib, largest), y=2, height=18, fill=fill))
    more = [] if asleep is None else [f"asleep {_mib(asleep)}"]
    return _chart_row(row, parts, _mib(peak) or "not seen", more)


def _milliseconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else _seconds(value)


def _timeline(page: Page) -> list[Markup]:
    if not page.lanes:
        return []
    marks = [
        _tag("text", says, x=_share(tick, page.longest), y=11)
        for tick, says in _ticks(page.longest)
        if tick < 0.97 * page.longest  # else it sticks out
    ]
    axis = _tag(
        "div",
        _tag("div", "host, engine", class_="who"),
        _tag("div", _tag("span", _clock(page.begin)), _tag("span", _clock(page.end)), class_="ends"),
        _tag("svg", *marks, class_="ticks", aria_hidden="true"),
        _tag("div", "out of rotation", class_="took"),
        class_="axis",
    )
    return [
        _tag("h2", "Timeline"),
        _tag(
            "p",
            "One lane for each engine that left the rotation, in that order. The patterned bar counts from its "
            "withdrawal; a bare line is time between two steps. The small box shows when that was in the whole run.",
            class_="soft",
        ),
        _legend({one["phase"] for lane in page.lanes for one in lane.phases}),
        axis,
        _tag("ol", *(_lane(page, lane) for lane in page.lanes), class_="lanes"),
    ]


def _pair(before: t.Any, after: t.Any, unseen: str) -> str:
    if before is None and after is None:
        return unseen
    if before == after:
        return f"{after}, unchanged"
    return f"{unseen if before is None else before} → {unseen if after is None else after}"


def _digest(value: t.Any) -> str | None:
    return str(value).rpartition(":")[2][:8] if value else None


def _mib(value: t.Any) -> str | None:
    return None if value is None else f"{value:,} MiB".replace(",", " ").replace(" ", "\N{NO-BREAK SPACE}")


def _cells(row: Row) -> list[tuple[str, t.Any]]:
    cells: list[tuple[str, t.Any]] = [
        ("host", _name(row["name"])),
        ("engine", row["engine"]),
        ("outcome", _badge(row["outcome"])),
    ]
    if "from" in row:
        weights = _pair(_digest(row.get("weights_before")), _digest(row.get("weights_after")), "not on record")
        memory = _pair(_mib(row.get("gpu_mib_before")), _mib(row.get("gpu_mib_after")), "not seen")
        cut = row.get("requests_cut")
        cells += [
            ("vLLM", _pair(row["from"], row.get("runs"), "not on record")),
            ("weights", weights),
            ("GPU memory", memory),
            ("requests cut", "not known" if cut is None else cut),
            ("proved by", row.get("proof") or "nothing"),
        ]
    if "path" in row:
        ready, slept = row.get("ready_s"), row.get("sleep_s")
        share = row.get("cached_share")
        token = row.get("first_token_s")
        cells[2:] = [
            ("measured", _way(row)),
            ("round", row.get("round") or ""),
            ("outcome", _badge(row["outcome"])),
            ("proved after", "not seen" if ready is None else _seconds(float(ready))),
            ("first token", "not seen" if token is None else _milliseconds(float(token))),
            ("peak GPU memory", _mib(row.get("gpu_peak_mib")) or "not seen"),
            ("fell asleep in", "" if slept is None else _seconds(float(slept))),
            ("asleep", _mib(row.get("gpu_asleep_mib")) or ""),
            (
                "in the page cache",
                "" if share is None else "dropped" if row["path"] == "cold" else f"{100 * share:.0f} %",
            ),
            ("proved by", row.get("proof") or "nothing"),
        ]
    if row.get("speed_after") is not None:
        cells.append(("tokens/s", _pair(row.get("speed_before"), row["speed_after"], "not timed")))
    return cells


def _engines(page: Page) -> list[Markup]:
    rows = [row for row in page.rows if row["outcome"] not in UNTOUCHED]
    if not rows:
        return []
    cells = [dict(_cells(row)) for row in rows]
    heads = list(dict.fromkeys(head for one in cells for head in one))
    lines = [
        _tag("tr", *(_tag("td", _tag("span", one.get(head, "")), data_of=head) for head in heads)) for one in cells
    ]
    return [
        _tag("h2", "Engines, before and after" if "path" not in rows[0] else "Each measurement"),
        _tag("table", _tag("thead", _tag("tr", *(_tag("th", head) for head in heads))), _tag("tbody", *lines)),
    ]


def _untouched(page: Page) -> list[Markup]:
    found = []
    for outcome, words in UNTOUCHED.items():
        rows = page.of(outcome)
        if rows and outcome == "skipped":
            lines = [
                _tag(
                    "li",
                    _tag("b", f"{row['name']} {row['engine']}, {_way(row)}"),
                    f": {row['reason']}",
                )
                for row in rows
            ]
            found += [_tag("h2", words), _tag("ul", *lines)]
        elif rows:
            reasons = [f" ({row['reason']})" if row["reason"] else "" for row in rows]
            names = [_tag("span", f"{row['name']} {row['engine']}".strip(), why) for row, why in zip(rows, reasons)]
            found += [_tag("h2", f"{words}: {len(rows)}"), _tag("p", *names, class_="names n")]
    return found


def vllm_report_page(report: Row) -> str:
    """The report of a roll, an upgrade, a switch or another run as one HTML page.

    :param report: what the playbook writes as JSON.
    """
    page = Page(report)
    notes = [_tag("li", note) for note in report.get("soak") or ()]
    body = [
        _patterns(),
        _tag("header", _tag("h1", page.title), _tag("p", _tag("code", report.get("run") or "no run"), class_="soft")),
        _verdict(page),
        _figures(page),
        *_failures(page),
        *_resume(page),
        *_charts(page),
        *_timeline(page),
        *_engines(page),
        *([_tag("h2", "Seen while the first hosts were watched"), _tag("ul", *notes)] if notes else []),
        *_untouched(page),
        _tag(
            "footer",
            "Times are UTC. Requests cut: those that this run ended; 0 where an engine was seen without work before it "
            "stopped. What clients saw is not known to the hosts. The same as JSON lies beside this page.",
        ),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = [
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        _tag("title", f"{page.title} {report.get('run') or ''}"),
        _tag("style", Markup(STYLE)),
    ]
    return "<!doctype html>\n" + _tag("html", _tag("head", *head), _tag("body", *body), lang="en") + "\n"


class FilterModule:
    """Registers the filter."""

    def filters(self) -> dict[str, t.Callable[..., t.Any]]:
        return {"vllm_report_page": vllm_report_page}
