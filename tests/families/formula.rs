//! A decoder in f64, row by row, as its equations stand; LoRA of rank 2 on every projection.

use crate::Drawn;
use finetune::model::layout::Layout;

const HIDDEN: usize = 12;
const HEADS: usize = 4;
const SIZE: usize = 4;
const RANK: usize = 2;
const LORA_SCALE: f64 = 1.5;
const EPS: f64 = 1e-5;

pub struct Formula<'a> {
    pub weights: &'a Drawn,
    pub layout: &'a Layout,
    /// Before and after attention, before and after the feed-forward; empty for none.
    pub norms: [[&'static str; 2]; 2],
    pub gain_offset: f64,
    pub score_scale: f64,
    /// Of each layer; infinite where it is not rotated.
    pub thetas: [f64; 3],
    /// Keys that a query of each layer sees.
    pub windows: [usize; 3],
    pub gelu: bool,
    /// Whether q, k and v share a matrix and an adapter, as gate and up do, and only the first two values of a head rotate.
    pub joined: bool,
    /// Whether gate and up share a matrix and an adapter, and the feed-forward has names of its own.
    pub halved: bool,
    /// Whether the first and the last layer have a convolution of three taps, and the names of LFM2.
    pub convolved: bool,
    pub embedding_scale: f64,
    pub residual_scale: f64,
    pub logits_scale: f64,
}

impl Formula<'_> {
    fn path(&self, layer: usize, module: &str) -> String {
        let own = match module {
            "o_proj" if self.convolved => "self_attn.out_proj",
            "gate_proj" if self.convolved => "feed_forward.w1",
            "up_proj" if self.convolved => "feed_forward.w3",
            "down_proj" if self.convolved => "feed_forward.w2",
            "gates" => "conv.in_proj",
            "convolution" => "conv.out_proj",
            "gate_up_proj" if self.halved => "both.input",
            "down_proj" if self.halved => "both.output",
            "gate_proj" | "up_proj" | "gate_up_proj" | "down_proj" => &format!("mlp.{module}"),
            _ => &format!("self_attn.{module}"),
        };
        format!("layers.{layer}.{own}")
    }

    fn convolution(&self, flat: &[f64], layer: usize, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        const TAPS: usize = 3;
        let taps = self.weight(&format!("model.layers.{layer}.conv.conv.weight")).unwrap();
        let all: Vec<_> = x.iter().map(|x| self.project(flat, (layer, "gates"), x)).collect();
        let token = |t: usize| {
            let channel = |c: usize| {
                let product = |k: usize| {
                    let row = (t + k).checked_sub(TAPS - 1).map(|s| &all[s]);
                    row.map_or(0.0, |row| taps[c * TAPS + k] * row[c] * row[2 * HIDDEN + c])
                };
                all[t][HIDDEN + c] * (0..TAPS).map(product).sum::<f64>()
            };
            (0..HIDDEN).map(channel).collect::<Vec<_>>()
        };
        (0..x.len()).map(|t| self.project(flat, (layer, "convolution"), &token(t))).collect()
    }

    fn weight(&self, name: &str) -> Option<Vec<f64>> {
        Some(self.weights.values(name)?.iter().map(|&x| f64::from(x)).collect())
    }

    /// Normed in groups of as many values as the gain has; as it is where there is no such gain.
    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let Some(gain) = self.weight(&format!("{name}.weight")) else { return x.to_vec() };
        let group = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let inverse = (mean + EPS).sqrt().recip();
            x.iter().zip(&gain).map(|(x, g)| x * inverse * (g + self.gain_offset)).collect()
        };
        x.chunks(gain.len()).flat_map(group).collect()
    }

    fn project(&self, flat: &[f64], (layer, module): (usize, &str), x: &[f64]) -> Vec<f64> {
        let path = self.path(layer, module);
        let w = self.weight(&format!("model.{path}.weight")).unwrap();
        let part = |ab: &str| {
            let entry = self.layout.find(&format!("base_model.model.model.{path}.lora_{ab}.weight"));
            &flat[entry.unwrap().range()]
        };
        let (a, b) = (part("A"), part("B"));
        let h: Vec<f64> = a.chunks(x.len()).map(|row| dot(row, x)).collect();
        let bias = self.weight(&format!("model.{path}.bias"));
        let row = |(n, w): (usize, &[f64])| {
            let bias = bias.as_ref().map_or(0.0, |b| b[n]);
            dot(w, x) + bias + LORA_SCALE * dot(&b[n * RANK..][..RANK], &h)
        };
        w.chunks(x.len()).enumerate().map(row).collect()
    }

    /// Some of the outputs of a projection that may be a part of another one.
    fn part(&self, flat: &[f64], (layer, module): (usize, &str), x: &[f64]) -> Vec<f64> {
        let (whole, rows) = match module {
            "gate_proj" if self.halved => ("gate_up_proj", 0..20),
            "up_proj" if self.halved => ("gate_up_proj", 20..40),
            _ if !self.joined => (module, 0..usize::MAX),
            "q_proj" => ("qkv_proj", 0..16),
            "k_proj" => ("qkv_proj", 16..24),
            "v_proj" => ("qkv_proj", 24..32),
            "gate_proj" => ("gate_up_proj", 0..20),
            "up_proj" => ("gate_up_proj", 20..40),
            _ => (module, 0..usize::MAX),
        };
        let all = self.project(flat, (layer, whole), x);
        all[rows.start..rows.end.min(all.len())].to_vec()
    }

    /// Rotates each head of x at a position.
    fn rotate(&self, layer: usize, position: usize, mut x: Vec<f64>) -> Vec<f64> {
        for head in x.chunks_mut(SIZE) {
            if self.joined {
                // The first pair turns by the position itself.
                let (sin, cos) = (position as f64).sin_cos();
                (head[0], head[1]) = (head[0] * cos - head[1] * sin, head[1] * cos + head[0] * sin);
                continue;
            }
            for i in 0..SIZE / 2 {
                let frequency = match self.thetas[layer] {
                    f64::INFINITY => 0.0,
                    theta => theta.powf(-(2.0 * i as f64) / SIZE as f64),
                };
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (head[i], head[i + SIZE / 2]);
                (head[i], head[i + SIZE / 2]) = (a * cos - b * sin, b * cos + a * sin);
            }
        }
        x
    }

    fn attention(&self, flat: &[f64], layer: usize, x: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}");
        let projected = |module: &'static str, norm: Option<&str>| -> Vec<Vec<f64>> {
            let each = |(position, x): (usize, &Vec<f64>)| {
                let y = self.part(flat, (layer, module), x);
                norm.map_or(y.clone(), |norm| self.rotate(layer, position, self.norm(&name(norm), &y)))
            };
            x.iter().enumerate().map(each).collect()
        };
        let norms = if self.convolved { ["q_layernorm", "k_layernorm"] } else { ["q_norm", "k_norm"] };
        let (q, k) = (projected("q_proj", Some(norms[0])), projected("k_proj", Some(norms[1])));
        let v = projected("v_proj", None);
        let token = |t: usize| {
            let head = |h: usize| {
                // Two query heads share a key/value head.
                let (own, shared) = (h * SIZE..(h + 1) * SIZE, h / 2 * SIZE..(h / 2 + 1) * SIZE);
                let first = (t + 1).saturating_sub(self.windows[layer]);
                let scores =
                    (first..=t).map(|s| self.score_scale * dot(&q[t][own.clone()], &k[s][shared.clone()]));
                let weights: Vec<f64> = scores.map(f64::exp).collect();
                let total: f64 = weights.iter().sum();
                let value = |i: usize| (first..=t).map(|s| weights[s - first] * v[s][i]).sum::<f64>() / total;
                shared.clone().map(value).collect::<Vec<_>>()
            };
            (0..HEADS).flat_map(head).collect::<Vec<_>>()
        };
        (0..x.len()).map(|t| self.project(flat, (layer, "o_proj"), &token(t))).collect()
    }

    fn feed_forward(&self, flat: &[f64], layer: usize, x: &[f64]) -> Vec<f64> {
        let [gate, up] = ["gate_proj", "up_proj"].map(|module| self.part(flat, (layer, module), x));
        let root = (2.0 / std::f64::consts::PI).sqrt();
        let act = |x: f64| match self.gelu {
            true => 0.5 * x * (1.0 + (root * (x + 0.044715 * x.powi(3))).tanh()),
            false => x / (1.0 + (-x).exp()),
        };
        let act: Vec<f64> = gate.iter().zip(up).map(|(g, u)| act(*g) * u).collect();
        self.project(flat, (layer, "down_proj"), &act)
    }

    /// Logits of every position of a row.
    fn all_logits(&self, flat: &[f64], row: &[u32]) -> Vec<Vec<f64>> {
        let table = self.weight("model.embed_tokens.weight").unwrap();
        let mut x: Vec<Vec<f64>> =
            row.iter().map(|&id| table[id as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
        x.iter_mut().flatten().for_each(|x| *x *= self.embedding_scale);
        for layer in 0..self.thetas.len() {
            for (half, [before, after]) in self.norms.iter().enumerate() {
                let name = |norm: &str| format!("model.layers.{layer}.{norm}");
                let read: Vec<_> = x.iter().map(|x| self.norm(&name(before), x)).collect();
                let added = match half {
                    0 if self.convolved && layer != 1 => self.convolution(flat, layer, &read),
                    0 => self.attention(flat, layer, &read),
                    _ => read.iter().map(|x| self.feed_forward(flat, layer, x)).collect(),
                };
                for (x, y) in x.iter_mut().zip(added) {
                    let added = self.norm(&name(after), &y);
                    x.iter_mut().zip(added).for_each(|(x, y)| *x += self.residual_scale * y);
                }
            }
        }
        let head = self.weight("lm_head.weight").unwrap();
        let logits = |x: &Vec<f64>| {
            let normed = self.norm(if self.convolved { "model.embedding_norm" } else { "model.norm" }, x);
            head.chunks(HIDDEN).map(|row| dot(row, &normed) / self.logits_scale).collect()
        };
        x.iter().map(logits).collect()
    }

    /// The sum of the losses of the next tokens.
    pub fn loss(&self, flat: &[f64], rows: &[&[u32]]) -> f64 {
        let of_row = |row: &&[u32]| {
            let logits = self.all_logits(flat, row);
            let each = |(logits, &next): (&Vec<f64>, &u32)| {
                logits.iter().map(|x| x.exp()).sum::<f64>().ln() - logits[next as usize]
            };
            logits.iter().zip(&row[1..]).map(each).sum::<f64>()
        };
        rows.iter().map(of_row).sum()
    }

    /// Logits of the last position.
    pub fn logits(&self, flat: &[f64], row: &[u32]) -> Vec<f64> {
        self.all_logits(flat, row).pop().unwrap()
    }

    /// The most probable continuation.
    pub fn greedy(&self, flat: &[f64], prompt: &[u32], tokens: usize) -> Vec<u32> {
        let mut row = prompt.to_vec();
        for _ in 0..tokens {
            let logits = self.logits(flat, &row);
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
            row.push(best.unwrap() as u32);
        }
        row.split_off(prompt.len())
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
