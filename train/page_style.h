// What the page adds to the report's look (bench/report/style.h): lines, bands and heat maps.
#pragma once

namespace annulus::train {

inline constexpr const char* kPageStyle = R"css(
.fig{display:block;width:100%;height:auto;font-size:12px;overflow:visible}
.fig text{fill:var(--soft);font-variant-numeric:tabular-nums}
.fig .ft{fill:var(--ink);font-size:13.5px;font-weight:600}
.fig .fl{fill:var(--faint);font-size:11.5px}
.fig .fn{font-size:12px;font-weight:600}
.fig path{fill:none;stroke-linejoin:round;stroke-linecap:round}
.fig .g{stroke:var(--grid)}
.fig .rule{stroke:var(--faint);stroke-dasharray:3 4}
.fig .band{stroke:none;opacity:.16}
.fig .f0{fill:var(--s0)}.fig .f1{fill:var(--s1)}.fig .f2{fill:var(--s2)}.fig .f3{fill:var(--s3)}
.fig .f4{fill:var(--s4)}.fig .f5{fill:var(--s5)}.fig .f6{fill:var(--s6)}.fig .f7{fill:var(--s7)}
.fig .f8{fill:var(--s8)}
.fig .l0{stroke:var(--s0)}.fig .l1{stroke:var(--s1)}.fig .l2{stroke:var(--s2)}.fig .l3{stroke:var(--s3)}
.fig .l4{stroke:var(--s4)}.fig .l5{stroke:var(--s5)}.fig .l6{stroke:var(--s6)}.fig .l7{stroke:var(--s7)}
.fig .l8{stroke:var(--s8)}
.fig .t0{fill:var(--s0)}.fig .t1{fill:var(--s1)}.fig .t2{fill:var(--s2)}.fig .t3{fill:var(--s3)}
.fig .t4{fill:var(--s4)}.fig .t5{fill:var(--s5)}.fig .t6{fill:var(--s6)}.fig .t7{fill:var(--s7)}
.fig .t8{fill:var(--s8)}
.fig .soft{opacity:.4}
.fig .heat path{stroke-width:1;stroke-linecap:butt;shape-rendering:crispEdges}
.fig .hp{stroke:var(--s2)}.fig .hm{stroke:var(--s7)}
.fig .bar{stroke-width:9;stroke-linecap:butt}
.fig .frame{fill:none;stroke:var(--line)}
.fig .trace{stroke:var(--ink);stroke-width:1.1;opacity:.85}
.row{display:grid;gap:12px;margin:12px 0}
.two{grid-template-columns:repeat(2,minmax(0,1fr))}
.three{grid-template-columns:repeat(3,minmax(0,1fr))}
.row .card,.card.alone{padding:14px 14px 10px}
.card.alone{margin:12px 0}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;font-size:13.5px;margin:10px 0}
dt{color:var(--soft)}dd{margin:0}
@media(max-width:820px){.two,.three{grid-template-columns:minmax(0,1fr)}}
@media print{.row{break-inside:avoid}}
)css";

}  // namespace annulus::train
