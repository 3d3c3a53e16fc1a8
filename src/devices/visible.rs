//! The cards that an engine gave to this process, where the driver does not know it: Vulkan lists every card of the
//! machine, whatever CUDA_VISIBLE_DEVICES says.

use crate::backend::facts::Facts;

/// Variables of a vendor, and words in the names of its cards.
const VENDORS: [(&[&str], &[&str]); 2] = [
    (&["CUDA_VISIBLE_DEVICES"], &["nvidia", "geforce", "tesla", "quadro"]),
    (&["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"], &["amd", "radeon"]),
];

/// Values that leave no card.
const NONE: [&str; 3] = ["", "-1", "NoDevFiles"];

/// The adapters that this process may use, and the setting that hides the others.
pub fn visible(facts: &[&Facts], read: &dyn Fn(&str) -> Option<String>) -> (Vec<usize>, Option<String>) {
    let mut seen: Vec<usize> = (0..facts.len()).collect();
    let mut hiding = None;
    for (names, words) in VENDORS {
        let Some((name, list)) = names.iter().find_map(|name| Some((name, read(name)?))) else { continue };
        let own = |at: usize| words.iter().any(|word| facts[at].name.to_lowercase().contains(word));
        // An engine numbers the cards of a machine by their addresses.
        let mut cards: Vec<(&str, &str)> = (0..facts.len())
            .filter(|at| own(*at))
            .map(|at| (facts[at].pci.as_str(), facts[at].card.as_str()))
            .collect();
        cards.sort_unstable();
        cards.dedup();
        let Some(given) = given(&list) else { continue };
        let given: Vec<&str> = given.into_iter().filter_map(|nth| Some(cards.get(nth)?.1)).collect();
        let before = seen.len();
        seen.retain(|at| !own(*at) || given.contains(&facts[*at].card.as_str()));
        if seen.len() < before {
            hiding = Some(format!("{name}={list}"));
        }
    }
    (seen, hiding)
}

/// The numbers in a list; `None` if it names cards otherwise, which other drivers cannot be asked for.
fn given(list: &str) -> Option<Vec<usize>> {
    match list.trim() {
        none if NONE.contains(&none) => Some(Vec::new()),
        list => list.split(',').map(|nth| nth.trim().parse().ok()).collect(),
    }
}
