"""Style sheet of the report."""

STYLE = """
:root{color-scheme:light dark;--page:#f7f7f5;--card:#fff;--ink:#1c1c1a;--soft:#5c5c57;
--rule:#d9d9d3;--idle:#ecece8;--bar:#6b7785;--accent:#1f5fa8;--warn:#8a4b00;
--ef:#1f66b3;--eb:#79ade2;--ew:#c4dbf2;--lf:#b8501a;--lb:#eb9a66;--lw:#f6d5bf}
@media (prefers-color-scheme:dark){:root{--page:#141416;--card:#1d1d20;--ink:#ececea;--soft:#a9a9a4;
--rule:#3a3a3e;--idle:#2b2b2f;--bar:#8795a6;--accent:#7db7f5;--warn:#f0b060;
--ef:#6db1f5;--eb:#3a73ad;--ew:#25486b;--lf:#f39a60;--lb:#ad5f30;--lw:#663a1f}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
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
.scroll{overflow-x:auto;-webkit-overflow-scrolling:touch}
.scroll:focus-visible{outline:2px solid var(--accent);outline-offset:2px}
.wide>svg{min-width:620px}
svg{display:block;width:100%;height:auto;overflow:visible}
.narrow{max-width:36rem}
caption{text-align:left;padding:.5rem .6rem .2rem;font-weight:600;background:var(--page)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,19rem),1fr));gap:1rem}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums;
background:var(--card)}
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
""".strip()
