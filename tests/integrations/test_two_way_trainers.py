"""Two-way memory in other training libraries: only the conversion is needed, also with gradient accumulation."""

import pytest
import torch
from helpers.common import assert_same_state
from helpers.optional import library
from helpers.trainers import BATCH, STEPS, Scenes, scenes, sgd, two_way_loop, two_way_segmenter, two_way_weight

each_window = pytest.mark.parametrize("accumulate", [1, 3])


def assert_is_the_plain_loop(model, accumulate):
    assert_same_state(model, two_way_loop(accumulate))
    assert float(model.color[1].running_weight) == pytest.approx(two_way_weight(accumulate))
    assert float(model.color[1].backward_weight) == pytest.approx(two_way_weight(accumulate))


@each_window
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")
def test_lightning(accumulate):
    """It runs the last micro-batch of a window in a closure of the optimizer's step."""
    lightning = library("lightning.pytorch")

    class Task(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = two_way_segmenter()

        def training_step(self, batch, index):
            return self.net(**batch)["loss"]

        def configure_optimizers(self):
            return sgd(self.net)

    task = Task()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    torch.manual_seed(7)
    trainer.fit(task, scenes(accumulate))
    assert_is_the_plain_loop(task.net, accumulate)


@each_window
def test_accelerate(accumulate):
    accelerate = library("accelerate")
    try:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, rng_types=[])
        model = two_way_segmenter()
        model, optimizer, loader = accelerator.prepare(model, sgd(model), scenes(accumulate))
        torch.manual_seed(7)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        assert_is_the_plain_loop(model, accumulate)
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()


@each_window
def test_hugging_face(tmp_path, accumulate):
    transformers = library("transformers")

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self):
            return scenes(accumulate)

    model = two_way_segmenter()
    optimizer = sgd(model)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=0.0,
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _step: 1.0)
    data = Scenes(BATCH * accumulate * STEPS)
    trainer = InOrder(model, arguments, train_dataset=data, optimizers=(optimizer, constant))
    torch.manual_seed(7)
    trainer.train()
    assert_is_the_plain_loop(model, accumulate)
