import sys, time, os
from concurrent.futures import ProcessPoolExecutor
import multiprocessing

sys.path[:0] = ["bench", "tools"]


def variants():
    from attend_try import v1, v2
    from strata_nb.kernels.gpu import attention_batches as v3

    found = {}
    from strata_nb.kernels.gpu.attention_warpgroups import warpgroup_attention_kernel
    found["wg"] = warpgroup_attention_kernel(128, 128)
    for name, module in (("v3", v3), ("v1", v1), ("v2", v2)):
        for warps in (4, 8):
            if (name, warps) in (("v2", 8), ("v1", 8)):
                continue
            k = module.batch_attention_kernel(128, 128, warps)
            found[f"{name}_{warps}"] = k._replace(name=f"{k.name}_{name}")
    return found


def comp(name):
    from strata_nb.kernels.gpu.cubins import Cubins
    from strata_nb.kernels.table import KERNELS

    kinds = [a.kind for a in KERNELS["attention"].arguments]
    k = variants()[name]
    t = time.time()
    c = Cubins("sm_90")([(k, kinds)], None, lambda _: None)[k.name]
    return name, c.registers, c.spill_bytes, round(time.time() - t, 1)


if __name__ == "__main__":
    t0 = time.time()
    found = variants()
    with ProcessPoolExecutor(6, mp_context=multiprocessing.get_context("spawn")) as pool:
        for one in pool.map(comp, found):
            print(*one, flush=True)
    if "--dry" in sys.argv:
        raise SystemExit
    from contextlib import closing
    import card_attention as ca
    from strata_nb import backend, cpu
    from strata_nb.kernels.gpu import attention_launches

    with closing(backend.open_backend("cuda:0", cpu.physical_cores())) as card:
        plan = [(n, 4096, d) for d in (32768, 0) for n in ("today", "v3_4", "v1_4", "v2_4", "v3_8")]
        plan += [("v3_4", 512, 0), ("v3_4", 512, 32768), ("today", 512, 32768)]
        plan += [("wg", 4096, 0), ("wg", 4096, 32768), ("wg", 512, 0), ("wg", 512, 32768)]
        plan += [("v3_4", 256, 32768), ("wg", 256, 32768), ("today", 256, 32768)]
        for name, rows, depth in plan:
            if time.time() - t0 > 46:
                print("late")
                break
            if name != "today":
                attention_launches.batch_attention_kernel = lambda k, v: found[name]
                attention_launches.SOME_BLOCKS = 1
            try:
                one = ca.attention(card, rows, depth, [32, 4, 128], same_bits=name == "today")
            except SystemExit as error:
                print(name, error, flush=True)
                continue
            print(
                f"{name:6} {rows:5} {depth:6} {one['us']['median']:9.1f} us {one['tflops']:6.1f} TFLOPS {one['kernels']} diff {one['difference']:.1e}  {time.time() - t0:.0f}s",
                flush=True,
            )
