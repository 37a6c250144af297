"""A training loop of your own, for the model of own_model.py.  Nothing here knows how many workers there are, or that one may die."""


def train(ctx):
    model = ctx.build().model  # the weights of the run, wherever it stands
    ctx.on_committed(lambda step: print(f"step {step} can be told to others") if step % 50 == 0 else None)
    for step in ctx.steps():  # a world that breaks leaves this function; it is called again in the next one
        for batch in step.batches():  # this worker's microbatches
            errors = model(batch["x"]) - batch["y"]
            step.backward(
                errors.square().sum(), errors.numel()
            )  # a sum, and the number of terms in it: never a mean
        step.commit(metrics={"progress": step.number / ctx.job.steps})  # for all workers or for none
