"""What is told of the model at the start of a fit is of the whole of it, not of rank 0's stages."""

import logging

import lightning_utilities.core.rank_zero as rank_zero

from lightning_entrain.models.freezing import freeze
from lightning_entrain.strategy import EntrainStrategy
from tests.distributed.job import Job
from tests.distributed.ranks import run_ranks


def fits(root):
    """Two fits by one trainer: the counts of the module before, and what was told in each."""
    job = Job(num_batches=1, trainer={"max_epochs": 1})
    module = job.module()
    freeze(module.model, ("encoder",))
    parameters = list(module.parameters())
    whole = (
        sum(p.numel() for p in parameters),
        sum(p.numel() for p in parameters if p.requires_grad),
    )
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    log = rank_zero.log
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    trainer = job.make_trainer(EntrainStrategy(encoder_stages=1, llm_stages=1), 2, root)
    for _ in range(2):
        trainer.fit(module, job.loader(trainer, module))
        trainer.fit_loop.max_epochs += 1
    held = sum(p.numel() for p in module.parameters())
    return whole, held, [text for text in told if "parameters" in text]


def test_parameters_are_counted_over_all_ranks(tmp_path):
    whole, held, told = run_ranks(2, fits, tmp_path, timeout=60)[0]
    assert held < whole[0]
    assert len(told) == 2
    for text in told:
        assert f"the whole model has {whole[0]:,} parameters, {whole[1]:,} of them trained" in text
