//! From `Hello` to the first lease: the manifest, the model from this machine or from the coordinator, and devices
//! that pass the self-test. Each side refuses here what does not match.

use super::crew::Crew;
use super::session::{Holding, Session};
use super::wire::Wire;
use super::{Blueprint, Outcome, Shape, Source, Worker};
use crate::cluster::message::{Hello, Manifest, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::numeric::fixed::FRACTION_BITS;
use crate::train::event::{Link, Share};
use std::time::{Duration, Instant};

impl Worker<'_> {
    pub(super) async fn converse(&mut self, wire: &mut Wire<'_>, hello: Hello) -> Outcome {
        match self.join(wire, hello).await {
            Err(outcome) => outcome,
            Ok((crew, len)) => {
                let (inject, say, see) = (&self.equipment.inject, self.aside(), self.see);
                let with = Holding { crew: &crew, inject, say, see, share: &self.share };
                let outcome = Session::hold(wire, with, len).await;
                self.crew = Some(crew);
                outcome
            }
        }
    }

    /// Does everything up to `Ready` and `Measured`. Returns the devices and the number of values of the layout.
    async fn join(&mut self, wire: &mut Wire<'_>, hello: Hello) -> Result<(Crew, usize), Outcome> {
        wire.say(ToCoordinator::Hello(hello));
        let manifest = loop {
            if let ToWorker::Welcome(manifest) = wire.hear().await? {
                break *manifest;
            }
        };
        wire.set_silence(Duration::from_millis(manifest.silence_millis));
        self.not_older(&manifest)?;
        self.share.set(Share { steps: manifest.steps, ..self.share.get() });
        self.welcomed = true;
        let key = (manifest.model_hash.clone(), Shape::of(&manifest));
        let crew = match self.crew.take().filter(|crew| crew.of == key) {
            Some(crew) => crew,
            None => {
                let blueprint = self.blueprint(wire, &manifest).await?;
                fits(&blueprint, &manifest)?;
                self.open(wire, &key.0, blueprint).await?
            }
        }
        .mustered();
        crew.lines.iter().for_each(|line| (self.say)(line));
        crew.refused.iter().for_each(|line| self.aside()(line));
        let link = self.probe(wire, &manifest).await?;
        let (devices, refused) = (crew.devices.clone(), crew.refused.clone());
        let none = refused.join("; ");
        wire.say(ToCoordinator::Ready { devices, refused });
        if crew.devices.is_empty() {
            return Err(Outcome::Refused { reason: format!("no device here can take part: {none}") });
        }
        wire.say(ToCoordinator::Measured { devices: crew.measured(), link });
        let classes: Vec<String> = crew.devices.iter().map(|d| format!("{} ({})", d.name, d.class)).collect();
        let (run, name) = (plain(&manifest.run), plain(&manifest.name));
        self.aside()(&format!("in run {run} as {name}: {}", classes.join(", ")));
        Ok((crew, usize::try_from(manifest.parameters).unwrap_or(usize::MAX)))
    }

    /// Measures the network link by fetching parts of the model's files, which are discarded: one byte for the round
    /// trip, then enough bytes to show the bandwidth.
    async fn probe(&self, wire: &mut Wire<'_>, manifest: &Manifest) -> Result<Option<Link>, Outcome> {
        let largest = manifest.files.iter().zip(0..).max_by_key(|(file, _)| file.size);
        let (Source::Files { .. }, Some((file, index))) = (&self.source, largest.filter(|(f, _)| f.size > 0))
        else {
            return Ok(None);
        };
        let mut round_trip = f64::INFINITY;
        for _ in 0..3 {
            round_trip = round_trip.min(fetch(wire, index, 1).await?);
        }
        let mut bandwidth = 0.0;
        for part in PROBES {
            let part = part.min(file.size);
            let seconds = (fetch(wire, index, part).await? - round_trip).max(1e-6);
            bandwidth = part as f64 / seconds;
            if seconds > LONG_ENOUGH || part == file.size {
                break;
            }
        }
        Ok(Some(Link { bandwidth, round_trip }))
    }

    /// Output of lines that the coordinator gets too: none in the coordinator's own process, where it prints them
    /// itself.
    fn aside(&self) -> &dyn Fn(&str) {
        match self.source {
            Source::Here(_) => &|_| (),
            Source::Files { .. } => self.say,
        }
    }

    /// A scheduler may leave an old coordinator running: a worker that knows a later epoch does not follow it.
    fn not_older(&mut self, manifest: &Manifest) -> Result<(), Outcome> {
        match &self.before {
            Some((run, epoch)) if *run == manifest.run && *epoch > manifest.epoch => Err(Outcome::Lost {
                reason: format!(
                    "this coordinator is of epoch {}, and the run has gone on in epoch {epoch} elsewhere",
                    manifest.epoch
                ),
            }),
            before => {
                if before.as_ref().is_none_or(|(run, _)| *run != manifest.run) {
                    self.share.set(Share::default());
                }
                self.before = Some((manifest.run.clone(), manifest.epoch));
                Ok(())
            }
        }
    }

    async fn blueprint(&self, wire: &mut Wire<'_>, manifest: &Manifest) -> Result<Blueprint, Outcome> {
        let path = match &self.source {
            Source::Here(blueprint) => return Ok(blueprint.clone()),
            Source::Files { named: Some((path, hash)), .. } if *hash == manifest.model_hash => path.clone(),
            Source::Files { named: Some((path, hash)), .. } => {
                let (path, model) = (path.display(), &manifest.model);
                return Err(Outcome::Refused {
                    reason: format!(
                        "{path} (hash {hash}) is not the run's model {model} (hash {}): leave MODEL out here",
                        manifest.model_hash
                    ),
                });
            }
            Source::Files { named: None, cache } => cache.obtain(manifest, wire, self.say).await?,
        };
        Blueprint::open(&path, Shape::of(manifest)).map_err(|e| match e.is_configuration() {
            true => Outcome::Refused { reason: e.to_string() },
            false => Outcome::Failed { reason: e.to_string() },
        })
    }

    /// Opens the devices on a separate thread, because the conversation may end meanwhile. The opened devices are
    /// kept for the next conversation.
    async fn open(
        &mut self,
        wire: &mut Wire<'_>,
        model: &str,
        blueprint: Blueprint,
    ) -> Result<Crew, Outcome> {
        let (send, mut opened) = tokio::sync::oneshot::channel();
        let (equipment, model) = (self.equipment.clone(), model.to_string());
        let work = move || drop(send.send(Crew::open(&equipment, &model, blueprint)));
        let failed = |e: &dyn std::fmt::Display| Outcome::Failed { reason: format!("devices: {e}") };
        std::thread::Builder::new().name("open".into()).spawn(work).map_err(|e| failed(&e))?;
        loop {
            tokio::select! {
                crew = &mut opened => return crew.map_err(|e| failed(&e)),
                heard = wire.hear() => match heard {
                    Ok(_) => {}
                    Err(Outcome::Left) => return Err(Outcome::Left),
                    Err(outcome) => tokio::select! {
                        crew = opened => {
                            self.crew = crew.ok();
                            return Err(outcome);
                        }
                        () = wire.stopped() => return Err(Outcome::Left),
                    },
                },
            }
        }
    }
}

/// Bytes of the bandwidth measurements: a larger one follows if the smaller one was too short.
const PROBES: [u64; 3] = [256 << 10, 2 << 20, 16 << 20];
/// Seconds that a bandwidth measurement must take.
const LONG_ENOUGH: f64 = 0.02;

/// Seconds until `len` bytes of a file have arrived.
async fn fetch(wire: &mut Wire<'_>, file: u32, len: u64) -> Result<f64, Outcome> {
    let (began, mut have) = (Instant::now(), 0);
    wire.say(ToCoordinator::Fetch { file, offset: 0, len });
    while have < len {
        if let ToWorker::Piece { bytes, .. } = wire.hear().await? {
            have += bytes.len().max(1) as u64;
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

/// Checks that both sides have the same layout and fixed point.
fn fits(blueprint: &Blueprint, manifest: &Manifest) -> Result<(), Outcome> {
    let refused = |reason: String| Err(Outcome::Refused { reason });
    if manifest.fraction_bits != FRACTION_BITS {
        let theirs = manifest.fraction_bits;
        return refused(format!(
            "the coordinator adds with {theirs} binary places, this finetune with {FRACTION_BITS}: use one version"
        ));
    }
    if let Err(e) = blueprint.shape.lora.check() {
        return refused(format!("the run's LoRA configuration: {e}"));
    }
    let layout = blueprint.layout();
    if layout.len() as u64 != manifest.parameters || layout.hash() != manifest.layout {
        return refused(format!(
            "the run trains {} LoRA values, this finetune makes {} of the same configuration: other LoRA shape; use \
             one version on both sides",
            manifest.parameters,
            layout.len()
        ));
    }
    Ok(())
}
