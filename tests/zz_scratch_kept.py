import torch, time, dataclasses
from pathlib import Path
from tests.planner.test_memory import make_model, kept_bytes, SHAPE, rotary_bytes
from tests.distributed.ranks import run_on_ranks
from ratoon.distributed import ranks_mesh, sequence_group
from ratoon.models import set_sequence_parallel, set_recompute, set_compile
from ratoon.planner.activation_memory import activation_bytes
from ratoon.planner.memory_sizes import MicrobatchSize
import torch._dynamo
def work(ranks, _):
    group = sequence_group(ranks_mesh("cpu", 2), timeout_s=300)
    out=[]
    dt=torch.bfloat16
    for fam in ("llama","qwen3"):
      for rec in ("none","selective","full"):
            torch.compiler.reset()
            m = set_compile(set_recompute(make_model(fam, dt), rec), "layers").train()
            one = kept_bytes(m, 41, 30, 4)-161*rotary_bytes(rec,dt)
            two = kept_bytes(set_sequence_parallel(m, group), 41,30,4)-81*rotary_bytes(rec,dt)
            w=MicrobatchSize(num_rows=161,num_scored=120,recompute=rec,has_qk_norm=fam=="qwen3",is_compiled=True)
            est=activation_bytes(SHAPE, w, 2); est2=activation_bytes(SHAPE, w.share(2), 2)
            nc=activation_bytes(SHAPE, dataclasses.replace(w,is_compiled=False).share(2), 2)
            out.append([fam,rec,"one",one,est/one,"two",two,est2/two,"as if not compiled",nc/two])
    return out
if __name__=="__main__":
    import tempfile
    for r in run_on_ranks(2, work, Path(tempfile.mkdtemp()))[0]: print(r)
