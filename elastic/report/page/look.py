"""The look of the page: its style sheet, and the few lines of script that show the numbers below the pointer.

One accent, blue; vermilion for what went wrong and for validation.  The two are told apart by all common kinds of colour blindness (Okabe
and Ito 2008), and no mark is told from another by its colour alone.
"""

STYLE = """
:root{color-scheme:light dark;--paper:#fff;--soft:#f4f6f8;--line:#dde2e7;--ink:#1b232b;--mute:#57636e;--accent:#0067a3;--raw:#9dbfd6;
--bad:#c04a00;--c-compute:#0067a3;--c-data:#e69f00;--c-rest:#7fa9c4;--c-bad:#c04a00;--c-recover:#8d6ca8;--c-save:#2f8f6f;--c-away:#c3cad1}
@media(prefers-color-scheme:dark){:root{--paper:#14191e;--soft:#1d242b;--line:#323c45;--ink:#e6ebef;--mute:#9eabb6;--accent:#5cb6ee;
--raw:#3d6784;--bad:#ff8f4d;--c-compute:#3d9bd6;--c-data:#e8b23a;--c-rest:#587f98;--c-bad:#ff8f4d;--c-recover:#b197cc;--c-save:#4db893;
--c-away:#4a555f}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:36px 24px 64px}
header p{margin:0;color:var(--mute)}
.lead{margin-top:6px!important;color:var(--ink)!important;font-size:17px;max-width:70ch;overflow-wrap:anywhere}
h1{margin:2px 0 0;font-size:32px;line-height:1.2;letter-spacing:-.015em;overflow-wrap:anywhere}
h2{margin:0;font-size:18px;line-height:1.3;letter-spacing:-.005em}
section{margin-top:40px}
.told{margin:2px 0 10px;color:var(--mute);font-size:14px;max-width:85ch}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));margin:26px 0 0;
border:1px solid var(--line);border-radius:10px;overflow:hidden}
.tiles>div{padding:13px 16px 14px;border:solid var(--line);border-width:0 1px 1px 0;margin:0 -1px -1px 0}
.tiles dt{color:var(--mute);font-size:13px}
.tiles dd{margin:0}
.tiles .v{font-size:25px;line-height:1.3;font-weight:600;letter-spacing:-.01em;font-variant-numeric:tabular-nums}
.tiles .n{color:var(--mute);font-size:13px;line-height:1.4}
.charts{display:grid;grid-template-columns:1fr 1fr;gap:40px 36px;margin-top:40px}
figure{margin:0;grid-column:1/-1;min-width:0}
figure.half{grid-column:auto}
.legend{display:flex;flex-wrap:wrap;gap:2px 18px;margin:0 0 8px;padding:0;list-style:none;font-size:13px;color:var(--mute)}
.legend li{display:flex;align-items:center;gap:7px}
.key{width:18px;height:0;border-top:2px solid}
.key.raw{border-color:var(--raw)}.key.main,.key.stairs{border-color:var(--accent)}
.key.points{width:9px;height:9px;border:0;border-radius:5px;background:var(--bad)}
.plot{position:relative;margin-left:52px;touch-action:pan-y}
.plot svg{display:block;width:100%;overflow:visible}
.tall svg.area{height:280px}.mid svg.area{height:180px}.low svg.area{height:110px}
.grid{stroke:var(--line);stroke-width:1}
path,line{vector-effect:non-scaling-stroke;fill:none}
.raw{stroke:var(--raw);stroke-width:1}.main,.stairs{stroke:var(--accent);stroke-width:1.8;stroke-linejoin:round}
.points{stroke:var(--bad);stroke-width:1.2;stroke-dasharray:3 3}.dots{stroke:var(--bad);stroke-width:6;stroke-linecap:round}
.y,.x{position:absolute;color:var(--mute);font-size:12px;line-height:1;white-space:nowrap;font-variant-numeric:tabular-nums}
.y{right:calc(100% + 8px);transform:translateY(50%)}
.x{transform:translateX(-50%);top:calc(100% + 7px)}.x.first{transform:none}.x.last{transform:translateX(-100%)}
.unit{margin:26px 0 0 52px;text-align:right;color:var(--mute);font-size:12px;line-height:1}
.lanes{margin:30px 0 0 52px;border-top:1px solid var(--line)}
.lane{display:grid;grid-template-columns:1fr;border-bottom:1px solid var(--line);padding:3px 0 5px}
.lane b{font-weight:400;font-size:12px;line-height:1.5;color:var(--mute)}
.lane svg{display:block;width:100%;height:12px;overflow:visible}
.lane path{stroke-width:2}.lane .bad{stroke:var(--bad)}.lane .plain{stroke:var(--mute)}.lane .accent{stroke:var(--accent)}
.lane g path{stroke-width:9;stroke:transparent}.lane g path+path{stroke-width:2}
.lane g.bad path+path{stroke:var(--bad)}.lane g.plain path+path{stroke:var(--mute)}.lane g.accent path+path{stroke:var(--accent)}
.tip{position:absolute;z-index:2;top:6px;pointer-events:none;background:var(--ink);color:var(--paper);padding:7px 10px;border-radius:6px;
font-size:12.5px;line-height:1.5;max-width:300px;white-space:pre-line;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.rule{position:absolute;top:0;bottom:0;width:1px;background:var(--mute);pointer-events:none}
[hidden]{display:none}
.bar{display:flex;height:26px;border-radius:6px;overflow:hidden;margin:10px 0 12px;gap:1px}
.bar i{min-width:2px}
.dot{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:9px;vertical-align:-1px}
.compute{background:var(--c-compute)}.data{background:var(--c-data)}.rest{background:var(--c-rest)}i.bad{background:var(--c-bad)}
.recover{background:var(--c-recover)}.save{background:var(--c-save)}.away{background:var(--c-away)}
.scroll{overflow:auto;max-height:520px;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{padding:7px 12px;text-align:left;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:break-word;max-width:460px}
tr:last-child td,tr:last-child th{border-bottom:0}
thead th{position:sticky;top:0;background:var(--soft);color:var(--mute);font-weight:500;font-size:12.5px;z-index:1;vertical-align:bottom}
tbody th{font-weight:400}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
#incidents th,#incidents td{padding:7px 8px}#incidents td:nth-child(3){min-width:240px}
#incidents td:nth-child(4){white-space:nowrap}#incidents td:nth-child(5){min-width:104px}#incidents td:first-child{min-width:92px}
#branches td:nth-child(3){white-space:nowrap}thead .num{white-space:normal}
.incident{font-weight:600;color:var(--bad)}
summary{cursor:pointer;font-size:18px;font-weight:700;letter-spacing:-.005em}
pre{overflow:auto;background:var(--soft);border-radius:8px;padding:12px 14px;font-size:12.5px;line-height:1.45;white-space:pre-wrap;
overflow-wrap:anywhere}
footer{margin-top:44px;padding-top:14px;border-top:1px solid var(--line);color:var(--mute);font-size:13px}
footer p{margin:2px 0}
@media(max-width:760px){main{padding:22px 16px 48px}h1{font-size:26px}.lead{font-size:16px}.charts{grid-template-columns:minmax(0,1fr);
gap:34px}
.tiles{grid-template-columns:1fr 1fr;margin-top:20px}.tiles>div{padding:11px 12px}.tiles .v{font-size:21px}
.plot{margin-left:44px}.x.extra{display:none}.unit,.lanes{margin-left:44px}.tall svg.area{height:220px}
table.cards thead{display:none}table.cards,table.cards tbody,table.cards tr,table.cards td{display:block}
table.cards tr{border-bottom:1px solid var(--line)}table.cards tr:last-child{border:0}
table.cards tr{display:grid;grid-template-columns:repeat(4,1fr);gap:4px 8px;padding:11px 12px}
table.cards td{padding:0!important;border:0;text-align:left!important;white-space:normal;max-width:none;grid-column:1/-1;
min-width:0!important}
table.cards td.num{grid-column:auto}table.cards td::before{color:var(--mute);font-size:12px;font-weight:400;line-height:1.3;
margin-right:7px}
table.cards td.num::before{display:block;margin:0}table.cards td:empty{display:none}
#shares td:nth-child(4),#shares th:nth-child(4){display:none}}
@media print{.scroll{max-height:none}section,figure{break-inside:avoid}}
"""

SCRIPT = """
const data=JSON.parse(document.getElementById('data').textContent);
const number=v=>v===null?'not finite':Math.abs(v)>=1000&&Math.abs(v)<1e7?Math.round(v).toLocaleString('en'):String(+v.toPrecision(4));
const clock=s=>s<60?s.toFixed(1)+' s':s<3600?(s/60).toFixed(1)+' min':s<172800?(s/3600).toFixed(2)+' h':(s/86400).toFixed(2)+' d';
for(const plot of document.querySelectorAll('.plot')){
 const chart=data[plot.dataset.chart],tip=plot.querySelector('.tip'),rule=plot.querySelector('.rule'),[low,high]=chart.x;
 const hide=()=>{tip.hidden=rule.hidden=true};
 plot.addEventListener('pointerleave',hide);
 plot.addEventListener('pointermove',event=>{
  const box=plot.getBoundingClientRect(),part=Math.min(1,Math.max(0,(event.clientX-box.left)/box.width)),at=low+part*(high-low);
  let near=null;
  for(const line of chart.lines)for(const p of line.points)if(near===null||Math.abs(p[0]-at)<Math.abs(near-at))near=p[0];
  if(near===null)return hide();
  const said=[chart.unit==='s'?clock(near)+' since the beginning':'step '+near.toLocaleString('en')],slack=(high-low)/120;
  for(const line of chart.lines){
   let best=null;
   for(const p of line.points)if(best===null||Math.abs(p[0]-near)<Math.abs(best[0]-near))best=p;
   if(best===null||(line.look!=='stairs'&&Math.abs(best[0]-near)>slack))continue;
   said.push(line.name+': '+number(best[3])+(best[1]<best[2]?' ('+number(best[1])+' to '+number(best[2])+')':''));
  }
  for(const lane of chart.lanes)for(const m of lane.marks)if(Math.abs(m[0]-near)<=slack&&said.length<9)
   said.push('• '+m[2][0]+(m[1]>1?' and '+(m[1]-1)+' more':''));
  tip.textContent=said.join('\\n');tip.hidden=rule.hidden=false;
  const x=(near-low)/(high-low)*box.width;rule.style.left=x+'px';
  tip.style.left=Math.max(-40,Math.min(x+12,box.width-tip.offsetWidth))+'px';
  if(x+12>box.width-tip.offsetWidth)tip.style.left=Math.max(-40,x-tip.offsetWidth-12)+'px';
 });
}
"""
