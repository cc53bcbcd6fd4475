"""GGUF's formats whose numbers are points of a grid: IQ1, IQ2 and IQ3 (ggml's block structures).

A block of 256 numbers has an fp16 d, a scale s of 3 or 4 bits for every 16 or 32 numbers, and for
every 8 (IQ3: 4) numbers which point of the format's grid they are. A point says the magnitudes,
and signs stand beside it; in IQ1 a point's numbers are -1, 0 and 1, and a bit says whether 1/8 is
added to each or taken off. Signs are 8 bits for 8 numbers, or 7 with an even count of minuses.

Here a number becomes a code, which says level and sign: w = d * unit * (2s + 1) * levels[code]. All
of that is exact in fp32. ``words`` hold 8 codes of 3 bits (IQ1, IQ2) or 4 of 4 bits (IQ3), the
first lowest, and the sign is a code's upper bit.
"""

from __future__ import annotations

from base64 import b85decode
from collections.abc import Callable
from typing import NamedTuple
from zlib import decompress

import numpy as np
import numpy.typing as npt

from octavo.loader.base import Bytes, WeightFormat

Words = npt.NDArray[np.uint32]

BLOCK = 256  # numbers
_SEVEN = np.arange(128, dtype=np.uint8)
# Seven signs as eight, by them.
_EVEN = _SEVEN | np.bitwise_xor.reduce(_SEVEN[:, None] << np.arange(1, 8) & 128, axis=1)


class GridBlocks(NamedTuple):
    d: npt.NDArray[np.float32]  # [blocks, 1]
    scales: Bytes  # [blocks, 16 or 8]: each s
    words: Words  # [blocks, 32 or 64]


class GridFormat(NamedTuple):
    """A format: bytes of a block, and how one is read."""

    block_bytes: int
    code_bits: int
    unit: float
    levels: npt.NDArray[np.int8]  # by code
    read: Callable[[Bytes], GridBlocks]

    def steps(self, blocks: Bytes) -> npt.NDArray[np.float32]:
        """[blocks, 16 or 8]: d * unit * (2s + 1)."""
        d, scales, _ = self.read(blocks)
        steps: npt.NDArray[np.float32] = (d * np.float32(self.unit)) * (2 * scales + 1)
        return steps

    def dequantize(self, blocks: Bytes) -> npt.NDArray[np.float32]:
        """[blocks, 256]"""
        words, steps = self.read(blocks).words, self.steps(blocks)
        shifts = np.arange(0, 8 * words.itemsize // self.code_bits) * self.code_bits
        shifts = shifts[: BLOCK // words.shape[1]]
        codes = words[:, :, None] >> shifts.astype(words.dtype) & ((1 << self.code_bits) - 1)
        numbers = self.levels[codes].astype(np.float32).reshape(*steps.shape, -1)
        values: npt.NDArray[np.float32] = steps[:, :, None] * numbers
        return values.reshape(len(blocks), BLOCK)


def _words(levels: npt.NDArray[np.integer], bits: int) -> Words:
    """Codes [rows, count], the first lowest."""
    shifts = bits * np.arange(levels.shape[1], dtype=np.uint32)
    words: Words = (levels.astype(np.uint32) << shifts).sum(axis=1, dtype=np.uint32)
    return words


def _grid(shape: tuple[int, int], packed: str) -> Words:
    """The words of a grid's points, of so many levels and numbers.

    A point is a number whose digits are its levels, the first lowest, and points are numbered in
    ascending order. ``packed`` has a bit for every possible point, set where it is in the grid.
    """
    levels, count = shape
    bits = np.frombuffer(decompress(b85decode(packed)), np.uint8)
    points = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    digits = points[:, None] // levels ** np.arange(count) % levels
    return _words(digits, 3 if count == 8 else 4)


def _sign_words(count: int, bits: int) -> Words:
    """The upper bits of ``count`` codes by their signs, the first lowest."""
    minus = np.arange(1 << count)[:, None] >> np.arange(count) & 1
    return _words(minus << (bits - 1), bits)


_IQ1 = _grid(
    (3, 8),
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2"
    "dT8mb2WdTox*h^v8VtnDuD#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;Qqcc"
    "SPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<"
    "XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^mWiJv*28-WD<$YEG%#}+D!ES;"
    "XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_OntvSw"
    "2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?"
    "+1SCIq;Fwj@yPMjA_U90?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U"
    "7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzc"
    "rHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49X^c}lqEMlIFjzJBbrp$X4T{{D_"
    "p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1",
)
_IQ2_XXS = _grid(
    (3, 8),
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;"
    "is&dxI!#Zg_{KuzkVd4Mw`?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbH"
    "qcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjUUWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_"
    "jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7",
)
_IQ2_XS = _grid(
    (3, 8),
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c"
    ")w(<-fCU6QVt|)*=>oJ=N8h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVC"
    "GbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^iqGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD"
    "31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx4=M73#xoc?jNErTmD?iDs40;"
    "(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC",
)
_IQ2_S = _grid(
    (3, 8),
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&Yf"
    "Ej@sgh^u5FBBgC>LAkBEEtarKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KV"
    "P=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<"
    "S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OBC|vDii4FoWN_zK9m?6y$}qXC"
    "*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6",
)
_IQ3_XXS = _grid(
    (8, 4),
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-"
    "c)&}FY<X@1m|7IGsjrX>q7@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKY"
    "tPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sMgqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA"
    "?Xny*@kmBo4W|8$?wEo20v5Uy_5",
)
_IQ3_S = _grid(
    (8, 4),
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!"
    "%0~0(%@Ao{OU0lD_x2OXCI^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+"
    "32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)g"
    "e8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR(zW`GY5;6>@R{_|3X$jRqNR^e"
    "u)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>",
)


_SIGNS_8 = _sign_words(8, 3)
_SIGNS_4 = _sign_words(4, 4)
_ALL_MINUS = _SIGNS_8[-1]


def _half(blocks: Bytes) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, :2]).view("<f2").astype(np.float32)


def _view(blocks: Bytes, begin: int, end: int, dtype: str) -> npt.NDArray[np.integer]:
    return np.ascontiguousarray(blocks[:, begin:end]).view(dtype)


def _fields(numbers: npt.NDArray[np.integer], count: int, bits: int) -> npt.NDArray[np.integer]:
    """[blocks, fields]: ``count`` fields of each number, from the lowest bits on."""
    shifts = (bits * np.arange(count)).astype(numbers.dtype)
    fields = numbers[:, :, None] >> shifts & ((1 << bits) - 1)
    return fields.reshape(len(numbers), -1)


def _iq1_s(b: Bytes) -> GridBlocks:
    qh = _view(b, 34, 50, "<u2")  # of 32 numbers: upper bits of four points, scale, sign of 1/8
    index = b[:, 2:34].astype(np.uint16) | _fields(qh, 4, 3) << 8
    minus = np.repeat(qh >> 15, 4, axis=1) * _ALL_MINUS
    return GridBlocks(_half(b), (qh >> 12 & 7).astype(np.uint8), _IQ1[index] | minus)


def _iq1_m(b: Bytes) -> GridBlocks:
    packed = _view(b, 48, 56, "<u2")  # four scales each, and above them a nibble of d
    d = packed >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    qh = _fields(b[:, 32:48], 2, 4)  # of 8 numbers: upper bits of the point, sign of 1/8
    index = b[:, :32].astype(np.uint16) | (qh & 7).astype(np.uint16) << 8
    return GridBlocks(
        _half(np.bitwise_or.reduce(d, axis=1, keepdims=True).view(np.uint8)),
        _fields(packed, 4, 3).astype(np.uint8),
        _IQ1[index] | (qh >> 3) * _ALL_MINUS,
    )


def _iq2_xxs(b: Bytes) -> GridBlocks:
    points = b[:, 2:66].reshape(-1, 8, 8)[:, :, :4].reshape(-1, 32)
    signs = _view(b, 2, 66, "<u4")[:, 1::2]  # of 32 numbers: four times seven, and the scale
    words = _IQ2_XXS[points] | _SIGNS_8[_EVEN[_fields(signs, 4, 7)]]
    return GridBlocks(_half(b), (signs >> 28).astype(np.uint8), words)


def _iq2_xs(b: Bytes) -> GridBlocks:
    q = _view(b, 2, 66, "<u2")
    words = _IQ2_XS[q & 511] | _SIGNS_8[_EVEN[q >> 9]]
    return GridBlocks(_half(b), _fields(b[:, 66:74], 2, 4).astype(np.uint8), words)


def _iq2_s(b: Bytes) -> GridBlocks:
    index = b[:, 2:34].astype(np.uint16) | _fields(b[:, 66:74], 4, 2).astype(np.uint16) << 8
    words = _IQ2_S[index] | _SIGNS_8[b[:, 34:66]]
    return GridBlocks(_half(b), _fields(b[:, 74:82], 2, 4).astype(np.uint8), words)


def _iq3_xxs(b: Bytes) -> GridBlocks:
    signs = _view(b, 66, 98, "<u4")  # as in IQ2_XXS
    halves = _fields(_EVEN[_fields(signs, 4, 7)], 2, 4)
    words = _IQ3_XXS[b[:, 2:66]] | _SIGNS_4[halves]
    return GridBlocks(_half(b), (signs >> 28).astype(np.uint8), words)


def _iq3_s(b: Bytes) -> GridBlocks:
    index = b[:, 2:66].astype(np.uint16) | _fields(b[:, 66:74], 8, 1).astype(np.uint16) << 8
    words = _IQ3_S[index] | _SIGNS_4[_fields(b[:, 74:106], 2, 4)]
    return GridBlocks(_half(b), _fields(b[:, 106:110], 2, 4).astype(np.uint8), words)


def _signed(*levels: int) -> npt.NDArray[np.int8]:
    """Levels by code, the negative ones after the positive."""
    return np.array([*levels, *(-level for level in levels)], np.int8)


_IQ1_LEVELS = np.array([-7, 1, 9, 0, -9, -1, 7, 0], np.int8)  # 8 · number ± 1
_IQ2_LEVELS = _signed(8, 25, 43, 0)

GRID_FORMATS: dict[WeightFormat, GridFormat] = {
    WeightFormat.IQ1_S: GridFormat(50, 3, 1 / 8, _IQ1_LEVELS, _iq1_s),
    WeightFormat.IQ1_M: GridFormat(56, 3, 1 / 8, _IQ1_LEVELS, _iq1_m),
    WeightFormat.IQ2_XXS: GridFormat(66, 3, 1 / 8, _IQ2_LEVELS, _iq2_xxs),
    WeightFormat.IQ2_XS: GridFormat(74, 3, 1 / 8, _IQ2_LEVELS, _iq2_xs),
    WeightFormat.IQ2_S: GridFormat(82, 3, 1 / 8, _IQ2_LEVELS, _iq2_s),
    WeightFormat.IQ3_XXS: GridFormat(98, 4, 1 / 2, _signed(2, 6, 10, 14, 18, 22, 26, 31), _iq3_xxs),
    WeightFormat.IQ3_S: GridFormat(110, 4, 1.0, _signed(1, 3, 5, 7, 9, 11, 13, 15), _iq3_s),
}
