//! Which projections get an adapter, with which rank and alpha: the rules of PEFT's LoraConfig (peft 0.21,
//! `check_target_module_exists` and `get_pattern_key`) for the names of a model. A name is a suffix of a module's path,
//! after a dot: `q_proj`, `self_attn.q_proj`, `layers.3.self_attn.q_proj`.

use super::config::Config;
use super::layout::{adapted, peft_path};
use super::lora::{EMBEDDING, Ends, Exception, HEAD, LoraError, LoraSpec, MODULES, Numbers, TARGETS};
use crate::families::tensors::Matrix;
use regex::Regex;

/// Every module of the family.
pub const ALL: &str = "all-linear";

/// A choice of projections and of their numbers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Choice {
    /// `target_modules`: names, lists of names with commas, or `all-linear`; or one regular expression of whole paths.
    pub targets: Vec<String>,
    /// `layers_to_transform`; empty: every layer.
    pub layers: Vec<usize>,
    /// `exclude_modules`: names, or one regular expression of whole paths.
    pub exclude: Vec<String>,
    /// `rank_pattern`: regular expressions of the end of a path, and ranks. The first that matches counts.
    pub ranks: Vec<(String, usize)>,
    /// `alpha_pattern`: the same for alphas.
    pub alphas: Vec<(String, f32)>,
}

type Checked<T> = Result<T, LoraError>;

impl Choice {
    /// The adapters of this choice, with the rank and alpha of `common` where no pattern matches. What is no choice of
    /// modules stays as in `common`.
    pub fn resolve(&self, config: &Config, common: LoraSpec) -> Checked<LoraSpec> {
        let each = |name: String| if name == ALL { all(config).collect() } else { vec![name] };
        let names: Vec<String> = names_of(&self.targets).into_iter().flat_map(each).collect();
        let targets = Rule::of(TARGETS, &names, config)?;
        let exclude = Rule::of("exclude-modules", &names_of(&self.exclude), config)?;
        if let Some(beyond) = self.layers.iter().find(|layer| **layer >= config.layers) {
            let why =
                format!("layer {beyond} does not exist: the model has layers 0 to {}", config.layers - 1);
            return Err(LoraError::Choice { option: "target-layers", why });
        }
        let (ranks, alphas) = (compiled(RANKS, &self.ranks)?, compiled(ALPHAS, &self.alphas)?);
        let numbers = |path: &str| {
            let has = targets.matches(path) && !exclude.matches(path);
            has.then(|| Numbers {
                rank: first(&ranks, path).unwrap_or(common.rank),
                alpha: first(&alphas, path).unwrap_or(common.alpha),
            })
        };
        let mut chosen = Vec::new();
        for layer in 0..config.layers {
            let asked = self.layers.is_empty() || self.layers.contains(&layer);
            for matrix in adapted(config, layer) {
                let path = path(config, layer, &matrix);
                chosen.push((layer, matrix.module(), numbers(&path).filter(|_| asked)));
            }
        }
        let [embedding, head] = [EMBEDDING, HEAD].map(|name| numbers(&end_path(config, name)?));
        let ends = Ends { embedding, head };
        if let Some((name, _)) = ends.named().next().filter(|_| !self.layers.is_empty()) {
            let why = format!("{name} is in no layer: name the modules of layers by their paths instead");
            return Err(LoraError::Choice { option: "target-layers", why });
        }
        let targets: Vec<String> = all(config)
            .filter(|module| chosen.iter().any(|(_, of, numbers)| of == module && numbers.is_some()))
            .collect();
        if targets.is_empty() && ends.is_empty() {
            return Err(LoraError::NoTargets { known: known(config) });
        }
        let usual = Some(Numbers { rank: common.rank, alpha: common.alpha });
        let other = |(layer, module, adapter): (usize, &str, Option<Numbers>)| {
            (adapter != usual && targets.iter().any(|target| target == module)).then(|| Exception {
                layer,
                module: module.to_owned(),
                adapter,
            })
        };
        let exceptions = chosen.into_iter().filter_map(other).collect();
        Ok(LoraSpec { targets, exceptions, ends, ..common })
    }

    /// Refuses patterns of ranks and alphas that apply to no adapter of `spec`.
    pub fn without_effect(&self, spec: &LoraSpec, config: &Config) -> Checked<()> {
        let of_layer = |layer: usize| {
            let own = adapted(config, layer).filter(move |m| spec.adapter(layer, m.module()).is_some());
            own.map(move |matrix| path(config, layer, &matrix))
        };
        let ends = spec.ends.named().filter_map(|(name, _)| end_path(config, name));
        let paths: Vec<String> = (0..config.layers).flat_map(of_layer).chain(ends).collect();
        applies(RANKS, &self.ranks, &paths)?;
        applies(ALPHAS, &self.alphas, &paths)
    }

    /// A short choice that [`resolve`](Self::resolve) makes `spec` of; nothing is excluded.
    pub fn of(spec: &LoraSpec, config: &Config) -> Self {
        let layers_of = |module: &String| -> Vec<usize> {
            with(module, config).filter(|layer| spec.adapter(*layer, module).is_some()).collect()
        };
        let own: Vec<Vec<usize>> = spec.targets.iter().map(layers_of).collect();
        let whole = |module: &String, layers: &[usize]| layers.len() == with(module, config).count();
        // Beside a tower, a suffix or a number of a layer would name its modules too.
        let alone = config.path().is_empty();
        let alike = own.first().filter(|first| own.iter().all(|layers| layers == *first));
        let all_whole = spec.targets.iter().zip(&own).all(|(module, layers)| whole(module, layers));
        // PEFT gives what is in no layer no adapter where layers are named.
        let no_ends = spec.ends.is_empty();
        let (mut targets, layers) = match alike {
            _ if all_whole && (alone || no_ends) => (spec.targets.clone(), Vec::new()),
            Some(layers) if alone && no_ends => (spec.targets.clone(), layers.clone()),
            _ => {
                let each = spec.targets.iter().zip(&own).flat_map(|(module, layers)| {
                    match alone && whole(module, layers) {
                        true => vec![module.clone()],
                        false => {
                            layers.iter().filter_map(|layer| below_model(config, *layer, module)).collect()
                        }
                    }
                });
                (each.collect(), Vec::new())
            }
        };
        targets.extend(spec.ends.named().map(|(name, _)| name.to_owned()));
        let ranks = patterns((spec, config), |of| of.rank, spec.rank);
        let alphas = patterns((spec, config), |of| of.alpha, spec.alpha);
        Choice { targets, layers, exclude: Vec::new(), ranks, alphas }
    }
}

/// Names with other numbers than the common one: a module where all its adapters have the same, otherwise each path.
fn patterns<T: Copy + PartialEq>(
    (spec, config): (&LoraSpec, &Config),
    of: impl Fn(Numbers) -> T,
    common: T,
) -> Vec<(String, T)> {
    let mut all = Vec::new();
    for module in &spec.targets {
        let each = with(module, config).filter_map(|layer| Some((layer, of(spec.adapter(layer, module)?))));
        let each: Vec<(usize, T)> = each.collect();
        match each.first() {
            Some((_, one)) if each.iter().all(|(_, other)| other == one) => {
                all.extend((*one != common).then(|| (module.clone(), *one)));
            }
            _ => {
                let others = each.iter().filter(|(_, value)| *value != common);
                all.extend(others.filter_map(|(layer, value)| {
                    Some((regex::escape(&below_model(config, *layer, module)?), *value))
                }));
            }
        }
    }
    let ends = spec.ends.named().map(|(name, numbers)| (name.to_owned(), of(numbers)));
    all.extend(ends.filter(|(_, value)| *value != common));
    all
}

/// The layers that have a module.
fn with(module: &str, config: &Config) -> impl Iterator<Item = usize> {
    (0..config.layers).filter(move |layer| config.matrix(*layer, module).is_some())
}

/// The path that PEFT compares with names: `model.layers.3.self_attn.q_proj`.
fn path(config: &Config, layer: usize, matrix: &Matrix) -> String {
    peft_path(config, layer, matrix).trim_start_matches("base_model.model.").to_owned()
}

/// The path of what is in no layer; `None` where the model has none.
fn end_path(config: &Config, name: &str) -> Option<String> {
    match name {
        EMBEDDING => Some(format!("model.{}{EMBEDDING}", config.path())),
        HEAD if config.labels.is_none() => Some(HEAD.to_owned()),
        _ => None,
    }
}

/// The same without `model.` at its begin, which no other module's path has in front of the rest.
fn below_model(config: &Config, layer: usize, module: &str) -> Option<String> {
    let path = path(config, layer, &config.matrix(layer, module)?);
    Some(path.trim_start_matches("model.").to_owned())
}

fn all(config: &Config) -> impl Iterator<Item = String> {
    config.family.modules().into_iter().map(String::from)
}

fn known(config: &Config) -> String {
    let ends = [EMBEDDING, HEAD].into_iter().filter(|name| end_path(config, name).is_some());
    config.family.modules().into_iter().chain(ends).collect::<Vec<_>>().join(", ")
}

/// The names of lists with commas. A regular expression may have commas and stays whole.
fn names_of(asked: &[String]) -> Vec<String> {
    let whole = asked.join(",");
    if is_regex(&whole) {
        return vec![whole];
    }
    whole.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Whether a text is no name but a regular expression.
pub fn is_regex(text: &str) -> bool {
    text.contains(['\\', '*', '+', '?', '(', ')', '[', ']', '{', '}', '|', '^', '$'])
}

fn regex(option: &'static str, text: &str, all: &str) -> Checked<Regex> {
    Regex::new(all).map_err(|e| {
        // The last line says what is wrong, those before it show where.
        let reason =
            e.to_string().lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned();
        LoraError::Choice { option, why: format!("{text:?} is not a regular expression: {reason}") }
    })
}

/// Which modules a list or a regular expression names.
enum Rule {
    Names(Vec<String>),
    Whole(Regex),
}

impl Rule {
    /// Checks that each name, or the expression, names at least one module.
    fn of(option: &'static str, names: &[String], config: &Config) -> Checked<Self> {
        let paths = || {
            (0..config.layers)
                .flat_map(|layer| adapted(config, layer).map(move |matrix| path(config, layer, &matrix)))
                .chain([EMBEDDING, HEAD].into_iter().filter_map(|name| end_path(config, name)))
        };
        if let [text] = names
            && is_regex(text)
        {
            let rule = Rule::Whole(regex(option, text, &format!(r"\A(?:{text})\z"))?);
            if paths().any(|path| rule.matches(&path)) {
                return Ok(rule);
            }
            let why = format!(
                "{text:?} is the whole path of no module: one of this model's is {}",
                paths().next().unwrap_or_default()
            );
            return Err(LoraError::Choice { option, why });
        }
        if let Some(name) = names.iter().find(|name| !paths().any(|path| is_at_end(name, &path))) {
            let (name, known) = (name.clone(), known(config));
            if option != TARGETS {
                let why = format!("{name:?} names no module that can have an adapter: these are {known}");
                return Err(LoraError::Choice { option, why });
            }
            let suffix = name.rsplit('.').next().unwrap_or(&name);
            let frozen = config.family.experts && MODULES.contains(&suffix);
            return Err(match frozen {
                true => LoraError::Experts { name, known },
                false => LoraError::Target { name, known },
            });
        }
        Ok(Rule::Names(names.to_vec()))
    }

    fn matches(&self, path: &str) -> bool {
        match self {
            Rule::Names(names) => names.iter().any(|name| is_at_end(name, path)),
            Rule::Whole(regex) => regex.is_match(path),
        }
    }
}

fn is_at_end(name: &str, path: &str) -> bool {
    path.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

const RANKS: &str = "rank-pattern";
const ALPHAS: &str = "alpha-pattern";

/// The patterns of an option as regular expressions.
fn compiled<T: Copy>(option: &'static str, all: &[(String, T)]) -> Checked<Vec<(Regex, T)>> {
    all.iter()
        .map(|(text, value)| Ok((regex(option, text, &format!(r"\A(?:.*\.)?(?:{text})\z"))?, *value)))
        .collect()
}

/// Refuses a pattern that is for none of these paths the first that matches.
fn applies<T: Copy>(option: &'static str, all: &[(String, T)], paths: &[String]) -> Checked<()> {
    let patterns = compiled(option, all)?;
    let used: Vec<Option<usize>> =
        paths.iter().map(|path| patterns.iter().position(|(regex, _)| regex.is_match(path))).collect();
    match (0..all.len()).find(|index| !used.contains(&Some(*index))) {
        None => Ok(()),
        Some(index) => {
            let text = &all[index].0;
            let why =
                format!("{text:?} applies to no module with an adapter, or only where an earlier one does");
            Err(LoraError::Choice { option, why })
        }
    }
}

/// The value of the first pattern that matches.
fn first<T: Copy>(patterns: &[(Regex, T)], path: &str) -> Option<T> {
    patterns.iter().find(|(regex, _)| regex.is_match(path)).map(|(_, value)| *value)
}
