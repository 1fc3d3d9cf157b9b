"""Cut the network into four stages on four ipus, from outside, and write a profile."""

import lightning.pytorch as pl
from images import arguments, datasets, iterations
from lightning.pytorch.strategies import IPUStrategy  # pyright: ignore[reportAttributeAccessIssue]
from simple_lightning_ipu import SimpleLightning, report, trainer

import poptorch

BATCH, ACCUMULATION = 64, 8


def main() -> None:
    parser = arguments(__doc__, epochs=5)
    parser.add_argument("--device-iterations", type=int, default=50, help="weight updates in a call")
    parser.add_argument("--report-dir", default="report", help="where the profile goes")
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    train, test = datasets(args.data_dir)

    module = SimpleLightning()
    layers = module.model.the_network  # what is before the first block runs on ipu 0
    for ipu, layer in ((1, layers[1]), (2, layers[3]), (3, layers[4])):
        poptorch.BeginBlock(layer, ipu_id=ipu)

    training = poptorch.Options()
    training.deviceIterations(iterations(args.device_iterations, train, ACCUMULATION * BATCH))
    training.Training.gradientAccumulation(ACCUMULATION)
    inference = poptorch.Options().deviceIterations(iterations(50, test, BATCH))

    strategy = IPUStrategy(training_opts=training, inference_opts=inference, autoreport_dir=args.report_dir)
    run = trainer(args.epochs, strategy=strategy, log_every_n_steps=1)
    train_loader = poptorch.DataLoader(training, train, BATCH, shuffle=True)
    run.fit(module, train_loader, poptorch.DataLoader(inference, test, BATCH))
    report(run)
    print(f"Profiles: {args.report_dir}")


if __name__ == "__main__":
    main()
