import torch
from tests.support.pipelines import *
def grads(ranks, stage, schedule, tied=True, m=4):
    run, ref = start(ranks, stage, "sgd", lambda: specs(tied), {"schedule": schedule, "num_microbatches": m}), Model(lambda: specs(tied))
    print("parts", run.model.pipe.parts, run.model.pipe.shared)
    with run.engine.forward_scope():
        loss = run.model.loss(*batch(0, run.mesh.data_rank, 8))
    loss.backward()
    run.engine.finish_reductions()
    r = ref.loss(*batch(0, 0, 8)); r.backward()
    g = dict(ref.named_parameters())
    for n, p in run.model.named_parameters():
        d = (p.grad - g[n].grad).abs().max() if p.grad is not None else None
        if d is None or d > 1e-6: print(n, d, p.grad.norm() if p.grad is not None else None, g[n].grad.norm())
    return float(loss), float(r)
def steps(ranks, stage, schedule, tied=True, m=4):
    run, ref = start(ranks, stage, "sgd", lambda: specs(tied), {"schedule": schedule, "num_microbatches": m}), Model(lambda: specs(tied))
    ro = OPTIMIZERS["sgd"](ref.parameters())
    for s in range(2):
        with run.engine.forward_scope():
            loss = run.model.loss(*batch(s, run.mesh.data_rank, 8))
        late = [n for n, p in run.model.named_parameters() if p.grad is not None]
        run.optimizer.zero_grad()
        loss.backward()
        run.engine.finish_reductions()
        ro.zero_grad(); r = ref.loss(*batch(s, 0, 8)); r.backward()
        g = dict(ref.named_parameters())
        print("step", s, "late", late, float(loss.detach()), float(r.detach()))
        for n, p in run.model.named_parameters():
            d = (p.grad - g[n].grad).abs().max() if p.grad is not None else None
            if d is None or d > 1e-6: print(n, d, p.grad.norm() if p.grad is not None else None, g[n].grad.norm())
        run.optimizer.step(); ro.step()
        for n, v in all_weights(run.engine).items():
            d = (v - g[n].detach()).abs().max()
            if d > 1e-6: print("weights", n, d)
