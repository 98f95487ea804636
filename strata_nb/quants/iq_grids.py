"""The grids of the IQ types: the lists of points that a quantised group of values is chosen from.

An IQ2 or IQ1 quant is an index into a list of points with eight coordinates, an IQ3 quant into one
with four. The lists cannot be computed: they were searched for by the authors of ggml and define
the formats. Source: `ggml/src/ggml-common.h` of llama.cpp (MIT licence, Copyright (c) 2023-2024
The ggml authors), tables `iq2xxs_grid`, `iq2xs_grid`, `iq2s_grid`, `iq3xxs_grid`, `iq3s_grid` and
`iq1s_grid`.

A coordinate takes few levels, so it is stored by its number: 2 bits for one of three levels, 3 bits
for one of eight, the first coordinate in the lowest bits. That makes a 16-bit code of each point.
The text is base85 of zlib of the low bytes of all codes, then their high bytes.
"""

from __future__ import annotations

import base64
import zlib

import numpy as np
from numpy.typing import NDArray


def _grid(levels: tuple[int, ...], width: int, text: str) -> NDArray[np.int8]:
    """Return the points (points, width) that `text` holds."""
    low, high = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(2, -1)
    codes = low | high.astype(np.uint16) << 8
    bits = (len(levels) - 1).bit_length()
    numbers = codes[:, None] >> np.arange(0, bits * width, bits, dtype=np.uint16)
    points: NDArray[np.int8] = np.array(levels, np.int8)[numbers & ((1 << bits) - 1)]
    points.flags.writeable = False
    return points


IQ2_XXS = _grid(
    (8, 25, 43),
    8,
    "c-n2x&2EA~5C`ya0}XHjqXv3Hf(`X4Rs#k-fl*>Tfx*PS#X`VXPiQdFn;H)7TXt95#zTLX{g|2kX94koq%?HH>h^4J7R"
    "4mpUTd7(#Mu#$k<xA3#C<nRvZ4Yc=!18%6J?xLzzYqF&Wtx4Mh(`7!>l-fpnG#-I&|#}iMoImE#U<CvkyqJBa*(lfY@C"
    "Cy|@tc(xwNMhPVL>0X-slO?HD7eSw_nCa_)yW>M-CASjwnHeA2j6?>^R0Y!_kK<g`*sv+=lJ?qnyUdpLhx&0!9K`G)8a"
    "SA7!_|hT{7`C72$je1gJr4d;yF(QBi2w1#2!BLTlH^~?O}*Z@X*OFemC-cqS-)$y4Z~zQoz9D8SzY|7$MhMSah!q645`"
    "t`yYqd2Jef>`U`D;oLn?|Ei#T2`mn*^~Ns?wad7iJ=>&?fuV0OEGS(b<6>3lw4uGQz)H_8fcT>",
)

IQ2_XS = _grid(
    (8, 25, 43),
    8,
    "c-no?&yMj>6aesJf^@791gmP0@)WmH6RcXHVOAwfOrN4erDla7Sd|#TQ-0^(@})%Pw`p_k`E$>Ow*VK4#1bi9$cd8tQB"
    "~^AR;Oo<EPKA(IzE5!JsgcE)0r$Ol`CpP9}LGcz@kWumt>`B{@hdU8Jhl((J_7gaGsRL;7;Om7;Kr&6~kmW1zub`&n<N"
    "0p@q3zV@8<h|3g)!N81vJRq+!gjR^$4)XRMYt#Rmir4NF6#=imqslN54Pr!xvrhOR9IDTY5-MxmB`;U{Y1MQF1ER=F@g"
    "P|<hK}c5UjB=w35n1{6-^xUqg9mX^0-0`^A^LC+oM~qUdx%NOHcd(vt!#8B7s%EYkiafSpOFh<E4N9JHW{6-Y;Uy<yg7"
    "2{9?>|_ry&0(4d8O0m=P3AdreP>HU^=mO(B5KTbL~*^;C`Hi{ZXSM{S?*uV^}C)!&48L3Gak@kA`nukbhDOK)EOR{|bE"
    "7x(0y2~pu!B3@A@<`qYYL?Y=*rBdlM@0DQ$l%;YgpU;b~LZL{Jmn5$eBYTyZ4^(kgshZ-UGWB}BannSarnRVcyZx!(bh"
    "_Pcuh&O|!M9-;=A)r&#Efq&%bHAV*Yt;)G4uI+u~<^8)oQ)jY<D}ywcqa#%<*_Sotew!az+0Dz8&uS",
)

IQ2_S = _grid(
    (8, 25, 43),
    8,
    "c-n>2Pml3H7y$4gY-~@psm<DxZLHu^3_+F?g5ZRx;8T>S(32H}_q1);;8VUc)6q_~y1$#uJb&hS3iyK|E-bu8W8!BrlP"
    "eU<)q1nrAB^OwviRQooUXpW(=-1PdHaaNZ2qfKYqUDja57u1x7rb)=&%q=lfb&Hs2kn7o=D+<5{c+Zli7T^+U|`Qqas_"
    "7mLt&-i0gDv4I@9knr5yl8`Ko3K`*XASP+xx@_{LCHrvD9&hJW#&f2~Js*E0)uheXnA2i8Kgmg*<k;#>1V_>+s+aaA2I"
    "vnW%9yV;RLYe!rN?(LyXg&@-C|6#n=UY0rVgnh4!4?RH1@ueBNw%EWU#Pbh-{~Z*EtrF#b8vYb4va&l`G+%ej$&-ijtt"
    "|3r^=q&PItI_rWco;cuaaEyB=HVQT7D1ez(c6KvcmarD4vV4tPTvV3WYoa1Br|ytD`DtY%zB+at?sc4fu*c$h{|9~Thh"
    "$X3iIU3)~E;!}_=5dC?eBsSYqo#wMWn_Ow*etz#~xYt0TPo8@L#VWeX2_pWs^edG7_)D6S4~d7%BZyYGq+XkcxR{t+T*"
    "04w9{f&$zXZKJ*@Yf?w&N(?TiDBsjo=~T;??qYFUojFVs1X{L{r@9(~`iFHz_2IL2nrkS-YI4yqf~!%c009A!QF07gbB"
    "mMcvZCnv53GMmqPpj2_lENru5-h>b?$vFu{vG^J)v3S*8fs3oFeD~E4tjcpiPVz=AviNoRW@5iEP`puCzoqo^f^W}0i{"
    "0C*??!N",
)

IQ3_XXS = _grid(
    (4, 12, 20, 28, 36, 44, 52, 62),
    4,
    "c-muNV&UZG7Z8$EvbJ?}_V5Y}jfhIjsc2|w>6|cW=Ir?^*Y7=e{KToNKe**p^nps;qq631IdSIP<ByEY99)9J5>hhi8V"
    "*jL0YQz;9bFS=>^gAh!p&#j7+Ey}LeeT*FFjyj;^Y<(5|dPNban+AA5mNmG`zEa!ld~N)*d`@=EomdZRhaBnuCYWJ!J$"
    "Ls9|d5;1m#<k_I$y>Z)BQZ%e3KIk*Mo_RQOS`vVKVth}~<&4l?2Hf%foltt4dG`ZsFiBmVY6fGRw!g70N?K<?DLs;C(D"
    "RRY?M<Oa}CV_?hTW;J_am|{2_#!haJBO53SVGs*RR_-A{vfF6;1n{0fmpzZ4w&!(W;kFW1X$sK4J%+r0vsrS6ArkL05="
    "TqzyU89@Sy^JFaQ9yoNsX",
)

IQ3_S = _grid(
    (1, 3, 5, 7, 9, 11, 13, 15),
    4,
    "c-muNWMXCK;N;@r6A%=YR!~w^*VHyJvb3>xaCCC<@bnD`4v&mYDJ-pOXl!lo=<b_1b;g`UOP8-)y<_*`lV>knx_SHFlN"
    "YbP|NP6q%`Ye-rJ$^7;p7q!6c(MBnqF4j*4aIC)y@Nlj$F8O?e>c|42(=H9Gu*|`~pIfGIBb4hE@)a&Tbw)ff3P(8Cex"
    "|4PCwc6Q;~suz2l;T?daGKXLlv^&58{e)_@8%Ecoot)!-*<LKcX7!j2@VaoI+%MKnsaq8k-pfm#`Gtdt}F9-^YOGqgyt"
    "7>SOTUgsVIC*&c2Zct)BxN?Xv`?HoWB$U`>v!%saOmjCOIL2*e)QrSBfEgGl&qqat&3++d_s0bLsR?2wHuF~ymsU93nq"
    "{|g(RhAl~mL<jV&FWU3~(B6AG$;j+`)S&WeL4&Ro2F{l>$`&)@!L=HwHS)G{z}^zaIeO3AD4TX^vBg-drCShxg4#HAE9"
    "ES%guy@MiRlQVN0n>%_Z&R(#7(~cu2PXj~mE(4Q@yn>~xdtg!boDC<=-gx|yiGxQ-K}B85%m!$uS720CL+9if^Hv`^e&"
    "YI*mtTJ~vIt12d4*+WFFJJO63~s3(gqFz;U!&j7Oma1<G`7V4@8xX9GqhcS{Ix=&A`GgAS9=tW8~x+lAPMu($P0@#>zv"
    "t?!IPZ<rdHgN@|*UfPq?okqE#<CSb-7SjYvecmNymfE_#FAO>(^051H18yWCm0lWynhYRq-0RTv`;d%",
)

IQ1 = _grid(
    (-1, 0, 1),
    8,
    "c-p0vQIF|f6vYvQd19iXo|sH!%%?z*;R!+T!~{{F;u2(dLR!HS6K$^fly~jZGJ3V#`Tu{9vYoTfT5Ipx94^m;pNl-byk"
    "?5!YUkJRV<zuDe}6e${y>lq3(0J*RB5!@-QIX1trVNX^PpGP+agsj<PFuMT1e(9jdo|TQS45an+t{GiA=swELW=a=6k2"
    "tA1vhcc7IURV}MVl3#Ce}+3Jcoc5`v+MGNSFe-@I3Vx`p<arwq@dkckQz0#*urVEu?tKFg6J$i6^eUDry`W&Y&O012}X"
    "esXx)N6v?Rco}n>{)iVH^7DXXe^n@zU5iV=y)`pOY(X{Js%ye2Y-MI@{uRu<u#ekWVI8aOs5MSMrdWekmS{7yZhAM9}I"
    "<~u|z7J!GV=(t&Yl`*q_Xn^5N)*Sm|sI{WhA=mPAm{Y&a@VJ-ffr?DVILrM%v&M{n>sM&;<3DYn|`N(g5um=cO68V<?f"
    "WNK|Zhivw5i>vj{fIMUR!e9X}VM34&o4w-YqHv8mAOYC>@qG2@@;&n8Z?h$iCiCru5oLBco#&;i=`{8tTzp`LoiDyHHY"
    "l)5QHV=b8+rAp2^P=j`Zp*sxN9lz_Ma{mF9fkIP9??8@u#vD3)W=H%8vH4O9JyK$I{27?~3G+<`87EyU6e`!jVX2-VhJ"
    "X@xgc|At0*D&xM6lj^&BDLn^x55552eDu!I^fqL(B`;+NXUad)`AWWiAi4u!|mmGc8^@ISu$y8qN;HS&uWqpRwXzb<GY"
    "Kir#C2BZkt?raByPKVo%A8_3##=Yr0}Uvh5Y_XT%j=JAwBA`JVKW_p@P64H)Q!*oNZQ~qAr?<0k+kgF_q9#B7XclN##1"
    "fI>kS)L8~*L~z+4PSB>IFuzr<-wa{0@a(edPCiezm+74`R#-3P5+b)RaGs@)lqPwNYx1e2!^##8Nf#p&U~5C~r9*aR`J"
    "XC(G^uZ6dOpD9J+V5Mjwiaw#9%Ik1ugks3;5Aum*7Nt#$j^ansC}?E79yQpASI?IcJNj^BJ2A+g6Ql)bLeE2d=z$I|7l"
    "96m)AKN`J?x{IguZtN^^2ZHdlT7Nt9GZ4Lu#NoWYhLxr#~FcWLhl#U?`bpn*btCr1e%k4-M`%j!l3mMtcBiP%x*4tynB"
    "yRMU<v(&iSWjh&Ln?$>t<oTlMocBp>s)O?`=2fF?7VtY6rnat3k;&%^jHi_CY!r^1%RxVdBhdjj7=L0Vj`}znuSt`Ozj"
    "7&if^k_n%pd~{KMBj6GoU}UP52%kNP8n*kYKbyrgGoLXqNosmHO<k-VtLxgn0T1LN3<}N*fb7D(-{irVp1SWvcd#p1ku"
    "wz9^nX0`#C5y?Sm0S+wN5tCukeI#YWX2Lj79>FZ+yUkw^+EW_PtgrH{W_isV6|OjR_7W9|M}JeARQ2hAldnl*IAXCj@="
    "QwW;xlR2C5b7+jW2Ov(e0HeC%e05QBuCQ5QH^*Ux^Agt`+<)OQ#e2nr1wIq});wMjxC{3ag7*lSz*`f(B4S0<geP;JO%"
    "N=I8F?`ye$A^XiN8qRC1oIOMdqK$-sa7O+<o%j6mC)c0VNB{KcMn|sQwpfH>v*{jT<ztXj$@ZpnadtUAlMZT_WD1f5k5"
    "g1{MrW8C@{G$>f?3E2bvQOqrXoxXtnk$r|~GtZuNrVsn?Rk)1hv6FyBj7*VWH&G~J{(ZH7pe*h3@P4N",
)
