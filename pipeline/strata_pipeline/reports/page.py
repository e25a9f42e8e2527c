"""A self-contained page: no scripts, no network, light or dark like the reader's system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strata_pipeline.reports.text import count_text, escaped

__all__ = ["Column", "LakeNote", "page", "plot", "section", "table"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1c1e21;--dim:#667;--paper:#fff;--line:#dde;
--s0:#1b6ca8;--s1:#e0a030;--s2:#c8553d;--s3:#4c9a5b;--s4:#8a63b8;--s5:#8b8f98}
@media(prefers-color-scheme:dark){:root{--ink:#e6e7ea;--dim:#99a;--paper:#15171a;--line:#33363d;--s0:#5aa9e6;
--s1:#e9b44c;--s2:#e8796a;--s3:#78c08a;--s4:#b393dd;--s5:#a2a7b0}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1rem;max-width:70rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.15rem;margin:2rem 0 .5rem}
p{margin:.4rem 0;max-width:46rem}.dim,.legend{color:var(--dim);font-size:.875rem}
code{overflow-wrap:anywhere}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.8125rem;width:100%}
th,td{padding:.25rem .45rem;border-bottom:1px solid var(--line);text-align:right;vertical-align:top;
white-space:nowrap}
th{color:var(--dim);font-weight:600}
th.text,td.text{text-align:left;white-space:normal;overflow-wrap:anywhere;min-width:8rem}
svg{display:block;width:100%;min-width:34rem;max-width:48rem;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--ink)}.grid{stroke:var(--line)}.line{stroke:var(--dim);stroke-width:2}
.s0{fill:var(--s0)}.s1{fill:var(--s1)}.s2{fill:var(--s2)}.s3{fill:var(--s3)}.s4{fill:var(--s4)}.s5{fill:var(--s5)}
.l0,.l1,.l2,.l3{fill:none;stroke-width:2}.l0{stroke:var(--s0)}.l1{stroke:var(--s1)}.l2{stroke:var(--s2)}.l3{stroke:var(--s3)}
.key::before{content:"";display:inline-block;width:.8em;height:.8em;margin:0 .4em 0 0;background:var(--s0)}
.key{margin-right:1.2em}.k1::before{background:var(--s1)}.k2::before{background:var(--s2)}
.k3::before{background:var(--s3)}.k4::before{background:var(--s4)}.k5::before{background:var(--s5)}
a{color:var(--s0)}nav{display:flex;flex-wrap:wrap;gap:.25rem 1.2rem;margin:.5rem 0}
.figures{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:1rem 0;padding:0}
.figures div{display:flex;flex-direction:column}.figures dd{margin:0;font-size:1.4rem;order:-1}
.figures dt{color:var(--dim);font-size:.875rem}
""".replace("\n", "")


@dataclass(frozen=True)
class LakeNote:
    """The lake that a report covers, and which days of it."""

    tip: str
    """The hash of the last manifest."""
    first_day: str
    last_day: str
    days: int


@dataclass(frozen=True)
class Column:
    """A column of a table. `is_text` columns are left-aligned and may be long."""

    name: str
    is_text: bool = False


def page(
    title: str,
    note: LakeNote,
    figures: Sequence[tuple[str, str]],
    sections: Sequence[str],
    links: Sequence[tuple[str, str]] = (),
) -> str:
    """The whole file. `figures` are names with values, shown in large type at the top; `sections` are HTML;
    `links` are titles and files of pages in the same folder."""
    days = note.first_day if note.first_day == note.last_day else f"{note.first_day} to {note.last_day}"
    told = "".join(f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>" for name, value in figures)
    beside = "".join(f'<a href="{escaped(file)}">{escaped(name)}</a>' for name, file in links)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escaped(title)}, {escaped(days)}</title><style>{_STYLE}</style></head><body>"
        f"{f'<nav>{beside}</nav>' if beside else ''}<main><h1>{escaped(title)}</h1>"
        f'<p class="dim">{escaped(days)} (UTC, {count_text(note.days)} days with packets) of the lake whose '
        f"last manifest is <code>{escaped(note.tip)}</code></p>"
        f'<dl class="figures">{told}</dl>{"".join(sections)}</main></body></html>\n'
    )


def section(title: str, about: str, *parts: str) -> str:
    """A heading, a sentence or two, and HTML below them."""
    return f"<section><h2>{escaped(title)}</h2><p>{escaped(about)}</p>{''.join(parts)}</section>"


def plot(svg: str) -> str:
    """A plot that scrolls if the screen is too narrow for it to be legible."""
    return _wide(svg)


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], total: int | None = None) -> str:
    """A table of texts. `total` is the number of rows that exist, if not all are given."""
    if not rows:
        return '<p class="dim">None.</p>'
    classes = [' class="text"' if column.is_text else "" for column in columns]
    head = "".join(
        f"<th{kind}>{escaped(column.name)}</th>" for kind, column in zip(classes, columns, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{kind}><bdi>{escaped(cell)}</bdi></td>" for kind, cell in zip(classes, row, strict=True)
        )
        + "</tr>"
        for row in rows
    )
    more = "" if total is None or total <= len(rows) else (
        f'<p class="dim">{count_text(len(rows))} of {count_text(total)} rows; the tables beside this page '
        "have all.</p>"
    )  # fmt: skip
    return _wide(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>") + more


def _wide(content: str) -> str:
    """HTML that may be wider than the screen: it scrolls, also by the keyboard, for which it takes the
    focus."""
    return f'<div class="wide" tabindex="0">{content}</div>'
