"""Tools around a `BatchOptimizer` that use its public interface alone, as a package of yours could: `doctor` is
`opt.check`, `uncertainty` is `opt.covariance`; `scaling`, `timeline`, `history` and `multistart` are methods of that
name; `resampling` and `hogwild` are functions of their own. What they are written with is in `batchopt.extending`;
loops of trainings are in `batchopt.training`."""
