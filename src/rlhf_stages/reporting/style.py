"""The style sheet of the page: one column on a phone, three on a desk, light, dark and on paper; nothing is fetched."""

_LIGHT = """
--paper:#fbfbf9;--card:#ffffff;--ink:#1d2327;--muted:#66707a;--hair:#e4e6e3;--soft:#f1f2ef;
--train:#2864b4;--val:#c4571b;--two:#3b8a5a;--three:#7a5aa6;--four:#8a8f98;--warn:#9a4a00;--warnbg:#fdf3e3"""
_DARK = """
--paper:#14171a;--card:#1b1f23;--ink:#e3e6e8;--muted:#98a2ab;--hair:#2d3338;--soft:#22272c;
--train:#7fb0f0;--val:#f0955c;--two:#75c797;--three:#b89be0;--four:#8b949e;--warn:#f2bd7c;--warnbg:#2d2418"""

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,"Noto Sans","PingFang SC","Noto Sans CJK SC",sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1180px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:25px;line-height:1.25;margin:0 0 4px;font-weight:650;letter-spacing:-.01em}
h2{font-size:19px;margin:52px 0 4px;padding-top:18px;border-top:1px solid var(--hair);font-weight:650}
h3{font-size:15px;margin:30px 0 8px;font-weight:650}
p{margin:4px 0 12px;max-width:76ch}
.muted,figcaption span,.meaning{color:var(--muted)}
.small{font-size:13px}
code,.mono{font:12.5px/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
.stages{display:flex;flex-wrap:wrap;gap:12px 26px;margin:22px 0 8px;padding:0;list-style:none}
.stages li{flex:1 1 200px;background:var(--card);border:1px solid var(--hair);border-radius:10px;padding:13px 16px;
position:relative;min-width:0;max-width:420px}
.stages .from::before{content:"→";position:absolute;left:-21px;top:38%;color:var(--muted)}
.stages a{color:inherit;text-decoration:none}
.stages .name{font-weight:650}
.stages .big{font-size:22px;font-variant-numeric:tabular-nums;margin:2px 0;white-space:nowrap}
.stages .big .muted{font-size:17px}
.warn{background:var(--warnbg);border-left:3px solid var(--warn);border-radius:4px;padding:10px 14px;margin:12px 0}
.warn ul{margin:4px 0 0;padding-left:19px}.warn li{margin:3px 0;overflow-wrap:anywhere}
.warn b{color:var(--warn);font-weight:650}
.grid-of{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,320px),1fr));gap:20px 22px;margin:16px 0}
figure{margin:0;min-width:0;break-inside:avoid}
figcaption{font-size:13.5px;line-height:1.35;margin-bottom:3px}figcaption b{font-weight:600}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font:11px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif;font-variant-numeric:tabular-nums}
.grid{stroke:var(--hair);stroke-width:1}.tick{fill:var(--muted);text-anchor:middle}.tick.left{text-anchor:end}
.curve{fill:none;stroke:currentColor;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round}
.edge{stroke:var(--ink);stroke-width:1;stroke-dasharray:4 3;opacity:.75}
.dot{fill:currentColor}.label{fill:currentColor;font-weight:600}
.c-train,.c-0{color:var(--train)}.c-val,.c-1{color:var(--val)}.c-2{color:var(--two)}.c-3{color:var(--three)}
.c-4{color:var(--four)}
.wide{overflow-x:auto;margin:8px 0 14px}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:600;text-align:left;color:var(--muted);font-size:12.5px;padding:4px 14px 4px 0;vertical-align:bottom}
td{padding:6px 14px 6px 0;border-top:1px solid var(--hair);vertical-align:top;overflow-wrap:anywhere;min-width:5.5em}
td:first-child code,code.id{white-space:nowrap}
td.n,th.n{min-width:0;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td .meaning{display:block;font-size:12.5px}.wide td:first-child{min-width:6em}
.bar{display:flex;height:14px;border-radius:4px;overflow:hidden;margin:10px 0;max-width:720px;background:var(--soft)}
.bar i{display:block;background:currentColor;border-right:2px solid var(--paper)}
.pair{background:var(--card);border:1px solid var(--hair);border-radius:10px;padding:14px 16px;margin:12px 0;
break-inside:avoid}
.pair .prompt{white-space:pre-wrap;overflow-wrap:anywhere;color:var(--muted);margin:0 0 10px;max-width:none}
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,260px),1fr));gap:12px 24px}
.answers .who{font-size:12.5px;color:var(--muted)}.answers .who b{color:var(--ink);font-weight:650}
.answers .text{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0 0;max-width:none}
footer{margin-top:52px;padding-top:14px;border-top:1px solid var(--hair);color:var(--muted);font-size:13px}
@media (max-width:560px){main{padding:18px 16px 40px}h1{font-size:21px}.stages{gap:22px}.stages li{max-width:none}
.stages .from::before{content:"↓";left:50%;top:-23px}}
@media print{body{font-size:10.5pt;background:#fff}main{max-width:none;padding:0}h2,h3{break-after:avoid}
.grid-of{grid-template-columns:repeat(3,1fr)}.bar,.warn{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
)
