"""Style sheets of the HTML pages: what they share, and what is their own. Light and dark."""

_COMMON = """
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.pair{display:grid;gap:1.1rem}
.scroll{overflow-x:auto}
:focus-visible{outline:3px solid currentcolor;outline-offset:2px}
svg{display:block;width:100%;height:auto}
table{border-collapse:collapse}
"""

RUN_STYLE = (
    _COMMON
    + """
:root{color-scheme:light dark;--page:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#5a626c;
--line:#d9dde2;
--grid:#e9ecef;--one:#1f66b5;--two:#b45309;--three:#0f766e;--four:#7c3aed;--wait:#c3c9d1;
--bad:#b42318;--good:#157347;--on:#fff}
@media (prefers-color-scheme:dark){:root{--page:#14171a;--card:#1c2024;--ink:#e8eaed;--soft:#a6aeb8;
--line:#353b42;--grid:#2a2f35;--one:#6cacf0;--two:#f0a24c;--three:#4cc3b3;--four:#b794f6;
--wait:#4a525c;--bad:#ff8a7a;--good:#6fcf97;--on:#10141a}}
main,header{max-width:68rem;margin:0 auto;padding:1rem 1.25rem}
h1{font-size:1.6rem;line-height:1.2;margin:.6rem 0 .2rem}
h2{font-size:1.15rem;margin:0 0 .5rem}
p{margin:.3rem 0 .7rem;max-width:46rem}
.soft{color:var(--soft)}
a{color:var(--one)}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:1rem;background:var(--card);padding:.5rem 1rem;z-index:1}
section{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:1rem 1.1rem;margin:0 0 1rem}
table{font-size:.92rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.75rem;
margin:0 0 1rem;padding:0;list-style:none}
.tiles li{background:var(--card);border:1px solid var(--line);border-radius:.6rem;
padding:.6rem .8rem}
.tiles b{display:block;font-size:1.45rem;line-height:1.3;font-weight:600}
.tiles span{color:var(--soft);font-size:.88rem}
.advice{padding-left:1.2rem;margin:.2rem 0}
.advice li{margin:0 0 .6rem;max-width:48rem}
figure{margin:0 0 .6rem}
figcaption{font-weight:600;margin:0 0 .2rem}
.pair{grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr))}
svg{max-width:38rem}
svg.wide{min-width:40rem;max-width:none}
svg text{fill:var(--ink);font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
svg .tick{fill:var(--soft);font-size:12px}
.axis{stroke:var(--line);stroke-width:1}
.grid{stroke:var(--grid);stroke-width:1}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.s1{stroke:var(--one)}.s2{stroke:var(--two);stroke-dasharray:6 4}
.s3{stroke:var(--three);stroke-dasharray:2 3}
.f1{fill:var(--one)}.f2{fill:var(--two)}.f3{fill:var(--three)}.f4{fill:var(--four)}
.fw{fill:var(--wait)}
.median{fill:none;stroke:var(--on);stroke-width:2}
.key{display:inline-flex;flex-wrap:wrap;gap:.2rem 1rem;margin:.1rem 0 .4rem;padding:0;
list-style:none;font-size:.9rem;color:var(--soft)}
.key li{overflow-wrap:anywhere;min-width:0}
.pair>*{min-width:0}
.key svg{display:inline-block;width:1.4rem;height:.8rem;margin-right:.35rem;vertical-align:-1px}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--grid);
vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
summary{cursor:pointer;color:var(--soft);font-size:.92rem}
code{font-family:ui-monospace,Consolas,monospace;font-size:.92em;overflow-wrap:anywhere}
@media (max-width:40rem){svg:not(.wide) .tick{font-size:15px}}
@media print{section{break-inside:avoid}details{display:none}}
"""
)
"""Of reports of runs."""

SIMULATION_STYLE = (
    _COMMON
    + """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1c1a;--soft:#5c5c57;
--rule:#d9d9d3;--idle:#ecece8;--bar:#6b7785;--accent:#1f5fa8;--warn:#8a4b00;
--ef:#1f66b3;--eb:#79ade2;--ew:#c4dbf2;--lf:#b8501a;--lb:#eb9a66;--lw:#f6d5bf}
@media (prefers-color-scheme:dark){:root{--page:#141416;--card:#1d1d20;--ink:#ececea;--soft:#a9a9a4;
--rule:#3a3a3e;--idle:#2b2b2f;--bar:#8795a6;--accent:#7db7f5;--warn:#f0b060;
--ef:#6db1f5;--eb:#3a73ad;--ew:#25486b;--lf:#f39a60;--lb:#ad5f30;--lw:#663a1f}}
main{max-width:72rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.6rem;line-height:1.2;margin:.1rem 0 .6rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem}
h3{font-size:1.05rem;margin:0 0 .2rem}
p{margin:.3rem 0 .7rem;max-width:60rem}
.kicker{color:var(--soft);font-size:.85rem;margin:0}
.setting{color:var(--soft);font-size:.92rem;margin:.1rem 0}
.warning{color:var(--warn)}
article{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:1rem;
margin:0 0 1.2rem}
article>p{color:var(--soft);font-size:.92rem}
figure{margin:0 0 .8rem}
figcaption{color:var(--soft);font-size:.85rem;margin-top:.3rem}
.wide svg{min-width:620px}
.pair{grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr))}
svg{overflow:visible}
.narrow{max-width:36rem}
caption{text-align:left;padding:.5rem .6rem .2rem;font-weight:600;background:var(--page)}
table{font-size:.88rem;font-variant-numeric:tabular-nums;background:var(--card)}
th,td{padding:.35rem .6rem;border-bottom:1px solid var(--rule);text-align:right;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
tbody th,thead th:first-child{text-align:left;position:sticky;left:0;background:var(--card)}
.best td,.best th{font-weight:700}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem 1.1rem;padding:0;margin:.4rem 0 1rem;
font-size:.88rem}
.legend li{display:flex;align-items:center;gap:.4rem}
.legend svg{width:14px;height:14px}
details summary{cursor:pointer;color:var(--accent);font-size:.9rem}
.t{font-size:12px;fill:var(--soft)}
.b{fill:var(--ink);font-weight:600}
.ef{fill:var(--ef)}.eb{fill:var(--eb)}.ew{fill:var(--ew)}
.lf{fill:var(--lf)}.lb{fill:var(--lb)}.lw{fill:var(--lw)}
.idle{fill:var(--idle)}.bar{fill:var(--bar)}
g>rect{stroke:var(--card);stroke-width:.5}
.axis{stroke:var(--soft);stroke-width:1}
.grid{stroke:var(--rule);stroke-width:1}
.mean{stroke:var(--ink);stroke-width:1.2;stroke-dasharray:5 4}
.end{stroke:var(--ink);stroke-width:1.4}
.ideal{stroke:var(--ink);stroke-width:2;stroke-dasharray:2 3}
.bottleneck{stroke:var(--ink);stroke-width:2}
@media (max-width:40rem){.t{font-size:13px}main{padding:1rem .75rem 3rem}article{padding:.75rem}}
@media print{article{break-inside:avoid}}
"""
)
"""Of reports of simulated policies."""
