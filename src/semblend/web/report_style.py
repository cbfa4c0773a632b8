"""The style sheet of reports: light, dark and paper. Nothing is fetched."""

STYLE = """
:root{color-scheme:light dark;--paper:#fcfcfb;--card:#fff;--ink:#1b1f24;--soft:#59626d;--faint:#e4e6e9;--rule:#9aa3ad;
--cold:#0b66a8;--warm:#c8510a;--bad:#c0123c;--good:#1c7a43;--band:#dfe5ea;
--exact:#9aa3ad;--candidate:#a7d8cf;--eligible:#45a596;--confirmed:#0b5f57}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--card:#1c2024;--ink:#e8eaed;--soft:#a5aeb8;--faint:#30363c;
--rule:#6d7680;--cold:#62b2f0;--warm:#f6964f;--bad:#ff6b88;--good:#5fce8d;--band:#2b3239;
--exact:#7d8791;--candidate:#2f5d57;--eligible:#3f9a8c;--confirmed:#7fe3d3}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .25rem;text-wrap:balance}
h2{font-size:1.2rem;margin:2.75rem 0 .25rem;text-wrap:balance}
p{margin:.35rem 0}.soft,figcaption,.when{color:var(--soft)}figcaption{font-size:.9rem;max-width:46rem}
.verdict{font-size:1.1rem;max-width:46rem;margin:1rem 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(12.5rem,1fr));gap:.75rem;margin:1.5rem 0 0;padding:0}
.tile{background:var(--card);border:1px solid var(--faint);border-radius:8px;padding:.7rem .9rem;list-style:none}
.tile b{display:block;font-size:1.5rem;line-height:1.25;font-weight:650;font-variant-numeric:tabular-nums}
.tile span{display:block;font-size:.85rem;color:var(--soft)}.tile.bad b{color:var(--bad)}.tile.good b{color:var(--good)}
figure{margin:0}figure svg{display:block;max-width:100%;height:auto;margin:.75rem 0 .25rem;overflow:visible}
.narrow{display:none}
.legend{display:flex;flex-wrap:wrap;gap:.25rem 1.1rem;margin:.5rem 0 0;padding:0;font-size:.9rem;color:var(--soft)}
.legend li{list-style:none;display:flex;align-items:center;gap:.4rem}.legend svg{margin:0;flex:none}
svg text{font:12px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;fill:var(--ink)}
svg .tick,svg .axis{fill:var(--soft);font-size:11px}svg .value{font-size:10px;fill:var(--soft)}
svg .name{font-size:13px}svg .big{font-size:14px;font-weight:600;font-variant-numeric:tabular-nums}
.grid{stroke:var(--faint)}.rule{stroke:var(--rule)}.link{stroke:var(--rule);stroke-opacity:.45}
.link.strong{stroke-width:3;stroke-opacity:.35}.whisker{stroke:var(--ink);stroke-opacity:.55}
.whisker.strong{stroke:var(--warm);stroke-width:2;stroke-opacity:.7}
.ceiling{stroke:var(--cold);stroke-width:1.5;stroke-dasharray:5 4}
.limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 4}
circle.cold,path.cold,rect.cold{fill:var(--cold)}circle.warm,path.warm,rect.warm{fill:var(--warm)}
circle.bad,path.bad,rect.bad{fill:var(--bad)}circle,path{stroke:var(--paper);stroke-width:1}
.faint{fill-opacity:.75}.band{fill:var(--band)}.rung-exact{fill:var(--exact)}.rung-candidate{fill:var(--candidate)}
.rung-eligible{fill:var(--eligible)}.rung-confirmed{fill:var(--confirmed)}
.scroll{overflow-x:auto;margin:.5rem 0}
table{border-collapse:collapse;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .9rem .3rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--faint)}
th{font-weight:600;color:var(--soft)}td.why{min-width:16rem}td.num,th.num{text-align:right;white-space:nowrap}td:first-child:not(.key){white-space:nowrap}
td.key{color:var(--soft);overflow-wrap:break-word;max-width:22rem}td.value{overflow-wrap:anywhere;min-width:9rem}
details{margin:.4rem 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
summary:focus-visible,a:focus-visible{outline:2px solid var(--cold);outline-offset:2px}
.answer{white-space:pre-wrap;max-width:34rem;font-size:.85rem}
.doubts{border:2px solid var(--bad);border-radius:6px;padding:.2rem 1rem;margin:1rem 0}
.doubts h2{color:var(--bad);margin:.6rem 0}
circle.unknown{fill:none;stroke:var(--soft);stroke-width:1.5}
.missing{border-left:3px solid var(--faint);padding-left:.8rem;color:var(--soft)}
@media (max-width:640px){td.key{max-width:9.5rem}th,td{padding-right:.55rem}table{font-size:.82rem}
main{padding:1.25rem 1rem 3rem}.wide{display:none}.narrow{display:block}h1{font-size:1.45rem}
.tiles{grid-template-columns:1fr 1fr;gap:.5rem}.tile b{font-size:1.25rem}}
@media print{:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--faint:#ccc;--rule:#888;
--cold:#0b66a8;--warm:#c8510a;--bad:#c0123c;--good:#1c7a43;--band:#e6e6e6;--exact:#9aa3ad;--candidate:#a7d8cf;
--eligible:#45a596;--confirmed:#0b5f57}body{font-size:11pt}main{max-width:none;padding:0}
.wide{display:block}.narrow{display:none}figure,.tile,tr{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
