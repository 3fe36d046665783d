"""What all integrations share, without a trainer."""

import torch
from helpers.double_forward import batch, transparent_net

from memnorm.integrations.attach import DEFAULTS, Attachment


def test_a_step_that_a_fused_optimizer_skips_does_not_move_the_schedule():
    model, scaler = transparent_net(), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    attached = Attachment(model, [optimizer], 10, double_forward=DEFAULTS, schedule=DEFAULTS, scaler=scaler)
    for seed, scale in ((1, 1.0), (2, float("inf")), (3, 1.0)):
        optimizer.zero_grad()
        scaler.scale(model(batch(seed)).square().mean() * scale).backward()
        scaler.step(optimizer)
        scaler.update()
    assert attached.state_dict()["schedule"]["last_step"] == 2
    assert attached.state_dict()["double_forward"]["steps"] == 2
