"""Tools around a `BatchOptimizer` that use its public interface alone, as a package of yours could: `doctor` is
`opt.check`, `scaling` is `opt.scaling`, `timeline` is `opt.timeline`, `uncertainty` is `opt.covariance`, and
`resampling` and `hogwild` are functions of their own. What they are written with is in `batchopt.extending`; loops of
trainings are in `batchopt.ignite`."""
