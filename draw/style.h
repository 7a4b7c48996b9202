// The look of our pages. Light and dark follow the reader's system; numbers are tabular; colour
// belongs to implementations, recipes and signs alone: .c0 to .c8 set --c, and what is coloured uses it.
#pragma once

namespace annulus::draw {

inline constexpr const char* kStyle = R"css(
:root{color-scheme:light dark;--bg:#fbfaf7;--card:#fff;--ink:#1d2126;--soft:#5d6670;--faint:#8b939c;
--line:#e4e1da;--grid:#edeae3;--s0:#0b6e69;--s1:#8a929a;--s2:#c2571a;--s3:#5b52b5;--s4:#b3861b;
--s5:#b0396a;--s6:#3b7a2a;--s7:#2a6db0;--s8:#8a5a44;--bad:#b3261e;--wash:#e3f1ef;
--shade:#1d212633}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1b1f23;--ink:#e8eaec;--soft:#a4adb6;
--faint:#78828c;--line:#2c3238;--grid:#262b30;--s0:#4fc3b8;--s1:#8d97a1;--s2:#f0905a;--s3:#a79ff0;
--s4:#e0b84f;--s5:#ee82ad;--s6:#8bc873;--s7:#77b3ec;--s8:#c79a84;--bad:#ff8a80;--wash:#173430;
--shade:#0009}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:15px/1.55 ui-sans-serif,system-ui,"Segoe UI",
"Helvetica Neue",Arial,sans-serif;-webkit-font-smoothing:antialiased}
main{max-width:1184px;margin:0 auto;padding:40px 32px 72px}
header{display:flex;gap:18px;align-items:center;margin-bottom:6px}
header svg{flex:none}
h1,h2{font-family:"Iowan Old Style","Palatino Linotype",Palatino,"Book Antiqua",Georgia,serif;
font-weight:600;letter-spacing:-.01em;line-height:1.2}
h1{font-size:34px;margin:0}
h2{font-size:25px;margin:56px 0 2px;padding-top:26px;border-top:1px solid var(--line)}
h3{font-size:15px;margin:30px 0 8px;font-weight:600}
p{margin:6px 0;max-width:76ch}
.lede,.where{color:var(--soft)}
.where b{color:var(--ink);font-weight:600}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(214px,1fr));gap:12px;margin:16px 0 6px}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px 12px}
.tile.lead{background:var(--wash);border-color:transparent}
.tile.failed{border-color:var(--bad)}.tile.failed .v{color:var(--bad)}
.tile .v{font-size:27px;line-height:1.15;font-weight:600;font-variant-numeric:tabular-nums;
letter-spacing:-.02em}
.tile .k{color:var(--soft);font-size:13px}
.tile .d{color:var(--faint);font-size:12px;margin-top:4px;overflow-wrap:anywhere}
.bad{color:var(--bad)}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;color:var(--soft);font-size:13px;margin:18px 0 2px}
.legend span{display:inline-flex;align-items:center;gap:6px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 14px 6px}
.panels{margin-top:12px;display:flex;flex-wrap:wrap;gap:12px 6px}
.panels .fig{flex:1 1 400px;min-width:0;max-width:560px}
.beside{display:grid;gap:12px;margin:12px 0}
.two{grid-template-columns:repeat(2,minmax(0,1fr))}
.three{grid-template-columns:repeat(3,minmax(0,1fr))}
.beside .card,.card.alone{padding:14px 14px 10px}
.card.alone{margin:12px 0}
.look{color:var(--soft);font-size:13px;line-height:1.45;margin:4px 6px}
.eq{font-family:"Iowan Old Style","Palatino Linotype",Palatino,Georgia,serif;font-size:16.5px;line-height:1.7;
margin:4px 6px;max-width:none;overflow-wrap:break-word}.eq small{color:var(--soft);font-size:13.5px}
.narrow{display:none}
.c0{--c:var(--s0)}.c1{--c:var(--s1)}.c2{--c:var(--s2)}.c3{--c:var(--s3)}.c4{--c:var(--s4)}
.c5{--c:var(--s5)}.c6{--c:var(--s6)}.c7{--c:var(--s7)}.c8{--c:var(--s8)}.hollow{--c:var(--faint)}
.fig{display:block;width:100%;height:auto;font-size:12px;overflow:visible}
.fig text{fill:var(--soft);font-variant-numeric:tabular-nums}
.fig .ft{fill:var(--ink);font-size:13.5px;font-weight:600}
.fig .fl{fill:var(--faint);font-size:11.5px}
.fig .fn{fill:var(--c);font-weight:600}
.fig path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.fig .g{stroke:var(--grid)}
.fig .rule{stroke:var(--faint);stroke-dasharray:3 4}
.fig .floor{stroke:var(--ink);stroke-width:1.3}
.fig .line{stroke:var(--c)}
.fig .band{fill:var(--c);opacity:.16}
.fig .soft{opacity:.4}
svg .m{fill:var(--c);stroke:var(--card);stroke-width:.8}
svg .hollow.m{fill:none;stroke:var(--c);stroke-width:1.3}
.fig .heat path{stroke-width:1;stroke-linecap:butt;shape-rendering:crispEdges}
.fig .hp{stroke:var(--s2)}.fig .hm{stroke:var(--s7)}
.fig .level{stroke-width:9;stroke-linecap:butt}
.fig .frame{stroke:var(--line)}
.fig .trace{stroke:var(--ink);stroke-width:1.1;opacity:.85}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:10px;background:
linear-gradient(90deg,transparent,var(--card) 70%) right/48px 100% local,
linear-gradient(90deg,transparent,var(--shade)) right/18px 100% scroll,var(--card);
background-repeat:no-repeat}
th:first-child,td:first-child{position:sticky;left:0;background:var(--card)}
table{border-collapse:collapse;width:100%;font-size:13px;font-variant-numeric:tabular-nums}
th{font-weight:600;color:var(--soft);text-align:right;padding:9px 10px;white-space:nowrap;
border-bottom:1px solid var(--line);font-size:12px}
td{text-align:right;padding:4px 10px;white-space:nowrap}
th.l,td.l{text-align:left}
tr.g td{border-top:1px solid var(--grid)}
tr:hover td{background:var(--grid)}
td.row{font-family:ui-monospace,"SF Mono",Menlo,Consolas,monospace;font-size:12px}
td.ours{font-weight:600}
td .key{vertical-align:-1px;margin-right:6px}
td.why{text-align:left;color:var(--soft);white-space:normal;min-width:170px}
.track{display:inline-block;width:60px;margin-right:8px;text-align:left;line-height:1}
.bar{display:inline-block;background:var(--c);height:7px;border-radius:2px;vertical-align:1px;opacity:.8}
.dim{color:var(--faint)}
.note,footer{color:var(--faint);font-size:12.5px}.note{max-width:none}
summary{margin:30px 0 8px;font-weight:600;cursor:pointer}
footer{margin-top:56px;padding-top:18px;border-top:1px solid var(--line)}
footer p{max-width:92ch}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;font-size:13.5px;margin:10px 0}
dt{color:var(--soft)}dd{margin:0}
@media(max-width:820px){.two,.three{grid-template-columns:minmax(0,1fr)}}
@media(max-width:640px){main{padding:24px 16px 48px}h1{font-size:27px}.card{padding:10px 6px 4px}
.tiles{grid-template-columns:repeat(2,minmax(0,1fr))}
.panels .fig{flex-basis:100%}.wide{display:none}.narrow{display:block}td,th{padding:4px 7px}
td.wrap{white-space:normal;min-width:92px}dl{grid-template-columns:1fr}dd{margin-bottom:6px}
td.row{white-space:normal;overflow-wrap:anywhere;min-width:132px}
.scroll::before{content:"more columns to the right →";position:sticky;left:0;display:inline-block;
padding:6px 10px 0;color:var(--faint);font-size:12px}}
@media print{.scroll,.card,.beside{break-inside:avoid}}
)css";

}  // namespace annulus::draw
