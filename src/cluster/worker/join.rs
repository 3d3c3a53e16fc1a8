//! From `Hello` to the first lease: the manifest, the model from this machine or from the coordinator, and devices
//! that pass the self-test. Each side refuses here what does not match.

use super::devices::DeviceThreads;
use super::mesh::Mesh;
use super::outbox::Outbox;
use super::parts::{Needed, guarded};
use super::peers::{Attached, PeerNet};
use super::session::{Company, Holding, Session};
use super::{Blueprint, ModelSource, Outcome, Portion, Shape, Unfit, Worker};
use crate::cluster::message::{Capacity, Hello, Manifest, SeatPlan, ToCoordinator, ToWorker};
use crate::cluster::plain::plain;
use crate::numeric::coarse;
use crate::numeric::fixed::FRACTION_BITS;
use crate::train::event::{Link, Share};
use std::path::Path;
use std::time::{Duration, Instant};

impl Worker<'_> {
    pub(super) async fn converse(&mut self, outbox: &mut Outbox<'_>, hello: Hello) -> Outcome {
        match self.join(outbox, hello).await {
            Err(outcome) => outcome,
            Ok(Joined { threads, len, company }) => {
                let (inject, say, see) = (&self.equipment.inject, self.aside(), self.see);
                let with = Holding { threads: &threads, inject, say, see, share: &self.share };
                let outcome = Session::hold(outbox, with, len, company).await;
                match threads.too_large() {
                    true => self.gives_up_layers(),
                    false => self.threads = Some(threads),
                }
                outcome
            }
        }
    }

    /// Does everything up to the first lease.
    async fn join(&mut self, outbox: &mut Outbox<'_>, hello: Hello) -> Result<Joined, Outcome> {
        outbox.say(ToCoordinator::Hello(hello));
        let manifest = loop {
            if let ToWorker::Welcome(manifest) = outbox.hear().await? {
                break *manifest;
            }
        };
        outbox.set_silence(Duration::from_millis(manifest.silence_millis));
        self.not_older(&manifest)?;
        self.share.set(Share { steps: manifest.steps, ..self.share.get() });
        self.welcomed = true;
        let mut opened = None;
        let plan = match manifest.seats {
            Some(most) => self.await_seat(outbox, (&manifest, most), &mut opened).await?,
            None => None,
        };
        self.seat = plan.clone();
        let shape = Shape { portion: plan.as_ref().map(Portion::of), ..Shape::of(&manifest) };
        let key = (manifest.model_hash.clone(), shape);
        let threads = match self.threads.take().filter(|threads| threads.of == key && !threads.too_large()) {
            Some(threads) => threads,
            None => {
                let blueprint = match opened {
                    Some(blueprint) => blueprint,
                    None => self.blueprint(outbox, &manifest, plan.as_ref().map(Needed::by)).await?.0,
                };
                fits(&blueprint, &manifest)?;
                self.open(outbox, &key.0, Blueprint { shape: key.1, ..blueprint }).await?
            }
        }
        .mustered();
        threads.lines.iter().for_each(|line| (self.say)(line));
        threads.refused.iter().for_each(|line| self.aside()(line));
        let link = self.link(outbox, &manifest).await?;
        let (devices, refused) = (threads.devices.clone(), threads.refused.clone());
        let none = refused.join("; ");
        outbox.say(ToCoordinator::Ready { devices, refused });
        if threads.devices.is_empty() {
            return Err(self.without_devices(&threads, none));
        }
        outbox.say(ToCoordinator::Measured { devices: threads.measured(), link });
        let classes: Vec<String> =
            threads.devices.iter().map(|d| format!("{} ({})", d.name, d.class)).collect();
        let silence = Duration::from_millis(manifest.silence_millis);
        let company = match &plan {
            Some(plan) => match self.take_seat(outbox, (plan, silence), &threads).await {
                Ok(line) => Company::Line(line),
                Err(outcome) => {
                    self.threads = Some(threads);
                    return Err(outcome);
                }
            },
            None => Company::Relays(self.peers.clone().map(|net| Mesh::new(net, silence))),
        };
        let (run, name) = (plain(&manifest.run), plain(&manifest.name));
        self.aside()(&format!("in run {run} as {name}: {}", classes.join(", ")));
        let all = usize::try_from(manifest.values()).unwrap_or(usize::MAX);
        let len = threads.of.1.portion.as_ref().map_or(all, |portion| portion.values.len());
        Ok(Joined { threads, len, company })
    }

    /// The network to the coordinator. A seat has reported it; who waited for one has measured it.
    async fn link(&mut self, outbox: &mut Outbox<'_>, manifest: &Manifest) -> Result<Option<Link>, Outcome> {
        match (&self.seat, manifest.seats, &self.capacity) {
            (Some(_), ..) => Ok(None),
            (None, Some(_), Some((_, capacity))) => Ok(capacity.link),
            _ => self.probe(outbox, manifest).await,
        }
    }

    /// Reports what the device can hold, and waits for its seat; `None` if it holds the whole model. Of a model that can
    /// be had in parts only the shapes are read; another one is left in `whole`.
    async fn await_seat(
        &mut self,
        outbox: &mut Outbox<'_>,
        (manifest, most): (&Manifest, u16),
        whole: &mut Option<Blueprint>,
    ) -> Result<Option<SeatPlan>, Outcome> {
        self.can_sit()?;
        let of = (manifest.model_hash.clone(), Shape::of(manifest), most);
        let capacity = match self.capacity.take().filter(|(before, _)| *before == of) {
            Some((_, capacity)) => capacity,
            None => {
                let (opened, fetched) = self.blueprint(outbox, manifest, Some(Needed::Shapes)).await?;
                fits(&opened, manifest)?;
                *whole = fetched.is_none().then(|| opened.clone());
                let link = self.probe(outbox, manifest).await?;
                Capacity { link, ..self.measure(outbox, (opened, usize::from(most))).await? }
            }
        };
        outbox.say(ToCoordinator::Capacity(capacity.clone()));
        self.capacity = Some((of, capacity));
        self.aside()("waits for its place among the workers that hold the model together");
        loop {
            if let ToWorker::Sit(plan) = outbox.hear().await? {
                return Ok(plan);
            }
        }
    }

    /// Why this worker takes no part now, or never.
    fn without_devices(&mut self, threads: &DeviceThreads, none: String) -> Outcome {
        if threads.too_large() {
            self.gives_up_layers();
            return Outcome::Lost { reason: none };
        }
        Outcome::Refused { reason: format!("no device here can take part: {none}") }
    }

    /// The device ran out of memory with the layers of its seat: from now on it reports that it has less.
    fn gives_up_layers(&mut self) {
        let (Some(plan), Some((_, capacity))) = (&self.seat, &mut self.capacity) else { return };
        let layers = plan.layers.0 as usize..plan.layers.1 as usize;
        let above = usize::from(plan.of - 1 - plan.place);
        let held = capacity.needs(above, &layers, plan.streamed as usize);
        capacity.limit = capacity.limit.min(held.saturating_sub(1));
        let (first, last) = (layers.start, layers.end - 1);
        (self.say)(&format!("layers {first} to {last} are too large for its memory: it asks for less"));
    }

    /// What the device can hold, found on a separate thread.
    async fn measure(
        &self,
        outbox: &mut Outbox<'_>,
        (blueprint, most): (Blueprint, usize),
    ) -> Result<Capacity, Outcome> {
        let (send, mut found) = tokio::sync::oneshot::channel();
        let equipment = self.equipment.clone();
        let work = move || drop(send.send(equipment.capacity(&blueprint, most)));
        let failed = |e: &dyn std::fmt::Display| Outcome::Failed { reason: format!("devices: {e}") };
        std::thread::Builder::new().name("measure".into()).spawn(work).map_err(|e| failed(&e))?;
        loop {
            tokio::select! {
                found = &mut found => {
                    let found = found.map_err(|e| failed(&e))?;
                    return found.map_err(|reason| Outcome::Refused { reason });
                }
                heard = outbox.hear() => drop(heard?),
            }
        }
    }

    /// Whether this worker can be a seat of a line.
    fn can_sit(&self) -> Result<(), Outcome> {
        let refused = |reason: &str| Err(Outcome::Refused { reason: reason.into() });
        match self.equipment.candidates.len() {
            1 if self.peers.is_some() => Ok(()),
            1 => refused("the coordinator's own devices are no seat of a line (--stages)"),
            _ => refused(
                "a seat of the coordinator's line (--stages) is one device: name one with --gpus, and start a worker \
                 for each",
            ),
        }
    }

    /// Connects with the neighbours in the line.
    async fn take_seat(
        &self,
        outbox: &mut Outbox<'_>,
        (plan, silence): (&SeatPlan, Duration),
        threads: &DeviceThreads,
    ) -> Result<Attached, Outcome> {
        let failed = |reason: String| Outcome::Failed { reason };
        let (Some(net), Some((queue, most))) = (&self.peers, threads.seat()) else {
            return Err(failed("a seat without a device".into()));
        };
        let listener = net.listen(plan).await.map_err(failed)?;
        let port = listener.as_ref().map_or(0, |listener| listener.address().port());
        outbox.say(ToCoordinator::Seated { port });
        let (tell, below) = tokio::sync::oneshot::channel();
        let mut met = net.meet(plan.clone(), silence, listener, below);
        let mut tell = Some(tell);
        let met = loop {
            tokio::select! {
                met = &mut met => break met,
                heard = outbox.hear() => if let ToWorker::Below { host, port } = heard? {
                    let at = PeerNet::endpoint(net, plain(&host), port);
                    tell.take().into_iter().for_each(|tell| drop(tell.send(at.clone())));
                },
            }
        };
        let met = met.map_err(|_| failed("the network's threads have ended".into()))?;
        let met = met.map_err(|reason| Outcome::Lost { reason: format!("the line: {reason}") })?;
        let attached = net.attach(met, queue, (most, plan));
        outbox.say(ToCoordinator::Linked);
        Ok(attached)
    }

    /// Measures the network link by fetching parts of the model's files, which are discarded: one byte for the round
    /// trip, then enough bytes to show the bandwidth.
    async fn probe(&self, outbox: &mut Outbox<'_>, manifest: &Manifest) -> Result<Option<Link>, Outcome> {
        let largest = manifest.files.iter().zip(0..).max_by_key(|(file, _)| file.size);
        let (ModelSource::Files { .. }, Some((file, index))) =
            (&self.source, largest.filter(|(f, _)| f.size > 0))
        else {
            return Ok(None);
        };
        let mut round_trip = f64::INFINITY;
        for _ in 0..3 {
            round_trip = round_trip.min(fetch(outbox, index, 1).await?);
        }
        let mut bandwidth = 0.0;
        for part in PROBES {
            let part = part.min(file.size);
            let seconds = (fetch(outbox, index, part).await? - round_trip).max(1e-6);
            bandwidth = part as f64 / seconds;
            if seconds > LONG_ENOUGH.max(ROUND_TRIPS * round_trip) || part == file.size {
                break;
            }
        }
        Ok(Some(Link { bandwidth, round_trip }))
    }

    /// Output of lines that the coordinator gets too: none in the coordinator's own process, where it prints them
    /// itself.
    fn aside(&self) -> &dyn Fn(&str) {
        match self.source {
            ModelSource::Here(_) => &|_| (),
            ModelSource::Files { .. } => self.say,
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

    /// Opens the run's model, and says which of its tensors are there; `None` stands for all. A worker that got no model
    /// reads the `needed` tensors only, if they can be had.
    async fn blueprint(
        &self,
        outbox: &mut Outbox<'_>,
        manifest: &Manifest,
        needed: Option<Needed>,
    ) -> Result<(Blueprint, Option<Needed>), Outcome> {
        let open = |path: &Path| Blueprint::open(path, Shape::of(manifest)).map_err(unfit);
        let path = match &self.source {
            ModelSource::Here(blueprint) => return Ok((blueprint.clone(), None)),
            ModelSource::Files { named: Some((path, hash)), .. } if *hash == manifest.model_hash => {
                path.clone()
            }
            ModelSource::Files { named: Some((path, hash)), .. } => {
                let (path, model) = (path.display(), &manifest.model);
                return Err(Outcome::Refused {
                    reason: format!(
                        "{path} (hash {hash}) is not the run's model {model} (hash {}): leave MODEL out here",
                        manifest.model_hash
                    ),
                });
            }
            ModelSource::Files { named: None, cache } => {
                if let Some(mut needed) = needed
                    && let Some(dir) = cache.obtain_parts((manifest, &mut needed), outbox, self.say).await?
                {
                    let whole = open(&dir)?;
                    let tensors = guarded(whole.tensors, needed.clone());
                    return Ok((Blueprint { tensors, ..whole }, Some(needed)));
                }
                cache.obtain(manifest, outbox, self.say).await?
            }
        };
        Ok((open(&path)?, None))
    }

    /// Opens the devices on a separate thread, because the conversation may end meanwhile. The opened devices are
    /// kept for the next conversation.
    async fn open(
        &mut self,
        outbox: &mut Outbox<'_>,
        model: &str,
        blueprint: Blueprint,
    ) -> Result<DeviceThreads, Outcome> {
        let (send, mut opened) = tokio::sync::oneshot::channel();
        let (equipment, model) = (self.equipment.clone(), model.to_string());
        let work = move || drop(send.send(DeviceThreads::open(&equipment, &model, blueprint)));
        let failed = |e: &dyn std::fmt::Display| Outcome::Failed { reason: format!("devices: {e}") };
        std::thread::Builder::new().name("open".into()).spawn(work).map_err(|e| failed(&e))?;
        loop {
            tokio::select! {
                threads = &mut opened => return threads.map_err(|e| failed(&e)),
                heard = outbox.hear() => match heard {
                    Ok(_) => {}
                    Err(Outcome::Left) => return Err(Outcome::Left),
                    Err(outcome) => tokio::select! {
                        threads = opened => {
                            self.threads = threads.ok();
                            return Err(outcome);
                        }
                        () = outbox.stopped() => return Err(Outcome::Left),
                    },
                },
            }
        }
    }
}

/// A worker that may get leases.
struct Joined {
    threads: DeviceThreads,
    /// Number of values of the parameters that it gets.
    len: usize,
    company: Company,
}

/// Bytes of the bandwidth measurements: a larger one follows if the smaller one was too short.
const PROBES: [u64; 3] = [256 << 10, 2 << 20, 16 << 20];
/// Seconds that a bandwidth measurement must take.
const LONG_ENOUGH: f64 = 0.02;
/// The same in round trips: TCP sends little at first.
const ROUND_TRIPS: f64 = 5.0;

/// Seconds until `len` bytes of a file have arrived.
async fn fetch(outbox: &mut Outbox<'_>, file: u32, len: u64) -> Result<f64, Outcome> {
    let (began, mut have) = (Instant::now(), 0);
    outbox.say(ToCoordinator::Fetch { file, offset: 0, len });
    while have < len {
        if let ToWorker::Piece { bytes, .. } = outbox.hear().await? {
            have += bytes.len().max(1) as u64;
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

fn unfit(e: Unfit) -> Outcome {
    match e.is_configuration() {
        true => Outcome::Refused { reason: e.to_string() },
        false => Outcome::Failed { reason: e.to_string() },
    }
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
    if !coarse::is_possible(manifest.sum_bits) {
        return refused(format!(
            "the coordinator rounds gradients to {} bits: use one version",
            manifest.sum_bits
        ));
    }
    if manifest.delay > 1 {
        return refused(format!(
            "the coordinator delays gradients by {} steps: use one version",
            manifest.delay
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
